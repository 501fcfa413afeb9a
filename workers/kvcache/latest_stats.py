"""The counters of a worker's pool, for heartbeats.

Owns: the last ones that were heard. Does not know: who is told.
"""

import asyncio
import contextlib

from kvstore.client.worker_client import WorkerClient
from mooncake.messages.pools import PoolStats


class LatestStats:
    """Made by `of`. A messenger that is slow must not make its worker look dead: then the last ones count."""

    def __init__(self, pool: WorkerClient, stats: PoolStats) -> None:
        self._pool, self._stats = pool, stats

    @classmethod
    async def of(cls, pool: WorkerClient) -> "LatestStats":
        """Asks for the first ones."""
        return cls(pool, await pool.stats())

    async def get(self, patience_s: float) -> PoolStats:
        """New ones, if they come within `patience_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                self._stats = await self._pool.stats()
        return self._stats
