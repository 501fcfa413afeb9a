"""The Conductor's orders about blocks that belong to no running request: pin, replicate, drop.

Pinned blocks are those of context caches.

Owns: passing orders on to later stages or other ranks, fetching copies. Does not know: why blocks are wanted,
how a pool keeps them.
"""

import asyncio
import logging

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.block_orders import BlockOrder, DropCopies, Pin, Replicate, Unpin
from workers.groups.followers import Followers
from workers.groups.next_stage import NextStage

log = logging.getLogger(__name__)


class BlockOrders:
    """The block orders of one session, carried out by tasks of `group`.

    `behind` is the link to later stages or other ranks, which have other shards of the blocks.
    """

    def __init__(
        self, pool: WorkerClient, behind: NextStage | Followers | None, group: asyncio.TaskGroup
    ) -> None:
        self._pool, self._behind, self._group = pool, behind, group

    def obey(self, order: BlockOrder) -> None:
        """Begin to carry out an order in a task: blocks may come from disk or from another instance."""
        self._group.create_task(self._carry_out(order))

    async def _carry_out(self, order: BlockOrder) -> None:
        if self._behind is not None:
            await self._behind.send(order)
        try:
            match order:
                case Pin(keys, ttl_s):
                    await self._pool.pin(keys, ttl_s)
                case Unpin(keys):
                    await self._pool.unpin(keys)
                case Replicate():
                    await self._replicate(order)
                case DropCopies(keys):
                    await self._pool.drop_idle(keys)
        except PoolError as error:
            if self._pool.closed.is_set():
                return  # the session ends
            log.warning("%s of %d blocks: %s", type(order).__name__, len(order.keys), error)

    async def _replicate(self, order: Replicate) -> None:
        """Fetch copies of blocks from their source.

        If the pool has no room, or the blocks do not arrive in time, the order is given up.
        """
        try:
            async with asyncio.timeout(order.timeout_s):
                reservation = await self._pool.reserve(order.keys, 0)
                try:
                    lacking = [i for i, block in enumerate(reservation.blocks) if not block.sealed]
                    if lacking:
                        await self._pool.fetch_ahead(reservation.reservation_id, order.shards, lacking)
                finally:
                    await self._pool.release(reservation.reservation_id)
        except TimeoutError:
            log.info("%d blocks of a hot prefix did not come within %g s", len(order.keys), order.timeout_s)
        except PoolFullError as error:
            log.info("%d blocks of a hot prefix are not copied: %s", len(order.keys), error)
