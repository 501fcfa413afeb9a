"""What has been computed of a sequence goes to the pool: when it ends, and when it is preempted.

The keys of blocks filled while decoding are chained from those of the prompt, so the next turn of the
conversation finds prompt and answer (Mooncake, section 3).

Owns: the blocks of a sequence in the pool. Does not know: when, or what for.
"""

import asyncio

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey, extended_keys
from workers.decode.block_transfers import BlockPair, BlockTransfers
from workers.decode.sequence import Sequence

ROOM_TIMEOUT_S = 1.0
"""the device's pages are wanted: how long the pool may take to find room, as on its disks"""


class Sealer:
    """Stores sequences that no iteration computes with."""

    def __init__(self, pool: WorkerClient, transfers: BlockTransfers) -> None:
        self._pool, self._transfers = pool, transfers
        self._block_size = pool.segment.layout.block_size

    async def seal(self, sequence: Sequence) -> int:
        """Every full block that the pool lacks. Returns how many that were; PoolFullError without room."""
        keys = self.keys_of(sequence)
        if not keys:
            return 0
        reservation = await self.store(keys, 0, sequence.pages, self.tokens_of(sequence, keys))
        await self._pool.release(reservation.reservation_id)
        return sum(not block.sealed for block in reservation.blocks)

    async def park(self, sequence: Sequence) -> Reservation:
        """All of its KVCache; it stays until the reservation is released. PoolFullError without room."""
        keys = self.keys_of(sequence)
        num_blocks = -(-sequence.num_kv_tokens // self._block_size)
        num_private = num_blocks - len(keys)
        return await self.store(keys, num_private, sequence.pages, self.tokens_of(sequence, keys))

    def keys_of(self, sequence: Sequence) -> list[BlockKey]:
        """Of its full blocks."""
        request, size = sequence.request, self._block_size
        num_blocks = sequence.num_kv_tokens // size
        known = request.block_keys[:num_blocks]
        return extended_keys(known, sequence.tokens[: num_blocks * size], size, request.root_key)

    def tokens_of(self, sequence: Sequence, keys: list[BlockKey]) -> list[int] | None:
        """What the keys stand for, if those who follow the pool may know."""
        return None if sequence.request.is_salted else sequence.tokens[: len(keys) * self._block_size]

    async def store(
        self, keys: list[BlockKey], num_private: int, device_pages: list[int], tokens: list[int] | None
    ) -> Reservation:
        """These pages of the device, in the pool. PoolFullError without room."""
        reservation = await self._reserve(keys, num_private)
        try:
            if self._pool.wants_token_ids and tokens is not None:
                await self._pool.describe_tokens(reservation.reservation_id, tokens)
            missing = [
                BlockPair(device_page, block.page)
                for device_page, block in zip(device_pages, reservation.blocks, strict=False)
                if not block.sealed
            ]
            checksums = await self._transfers.store(missing)
            layers = range(self._pool.segment.layout.num_layers)
            pages = [block.pool_page for block in missing]
            await self._pool.commit(reservation.reservation_id, layers, pages, checksums)
            await self._pool.settled()  # else its checksums might not be there when it is loaded again
        except BaseException:
            await self._pool.release(reservation.reservation_id)
            raise
        return reservation

    async def _reserve(self, keys: list[BlockKey], num_private: int) -> Reservation:
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                return await self._pool.reserve(keys, num_private)
        except TimeoutError:
            raise PoolFullError(f"the pool found no room within {ROOM_TIMEOUT_S:g} s") from None
