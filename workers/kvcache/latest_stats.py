"""The latest counters of a worker's pool, for heartbeats.

Owns: the latest received counters. Does not know: their readers.
"""

import asyncio
import contextlib

from kvstore.client.worker_client import WorkerClient
from mooncake.messages.pools import PoolStats


class LatestStats:
    """Pool counters that may be a little old, so that a slow messenger does not delay heartbeats."""

    def __init__(self, pool: WorkerClient, stats: PoolStats) -> None:
        self._pool, self._stats = pool, stats

    @classmethod
    async def of(cls, pool: WorkerClient) -> "LatestStats":
        """Ask the messenger for its first counters, and return them as a `LatestStats`."""
        return cls(pool, await pool.stats())

    async def get(self, timeout_s: float) -> PoolStats:
        """Return new counters if they arrive within `timeout_s` seconds, else the previous ones."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                self._stats = await self._pool.stats()
        return self._stats
