"""The blocks of context caches that the Conductor wants kept: pinned in the own pool, and behind it.

Owns: passing orders on to the stages or ranks behind. Does not know: caches, how a pool keeps a block.
"""

import asyncio
import logging

from kvstore.worker_client import WorkerClient
from mooncake.errors import PoolError
from mooncake.messages import Pin, Unpin
from workers.followers import Followers
from workers.next_stage import NextStage

log = logging.getLogger(__name__)


class Pinning:
    """Of one session, whose tasks are `group`'s. `behind` are pools with other shards of the same blocks."""

    def __init__(
        self, pool: WorkerClient, behind: NextStage | Followers | None, group: asyncio.TaskGroup
    ) -> None:
        self._pool, self._behind, self._group = pool, behind, group

    def obey(self, order: Pin | Unpin) -> None:
        """Beside everything else: blocks may have to come from disk."""
        self._group.create_task(self._carry_out(order))

    async def _carry_out(self, order: Pin | Unpin) -> None:
        if self._behind is not None:
            await self._behind.send(order)
        try:
            if isinstance(order, Pin):
                await self._pool.pin(order.keys, order.ttl_s)
            else:
                await self._pool.unpin(order.keys)
        except PoolError as error:
            if self._pool.closed.is_set():
                return  # the session ends, and the pins that were soon
            log.warning("blocks of a context cache are not kept: %s", error)
