"""A rank's KVCache of the sequences that its group decodes: blocks in its pool, pages saved in host memory.

The first rank performs each `RankWork` itself, and makes the other ranks perform the same work. The keys of
blocks filled while decoding are chained from the prompt's keys. So the next turn of the conversation finds
the blocks of prompt and answer (Mooncake, section 3).

Owns: reservations and saved pages, by the sequence's number. Does not know: the batch.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from workers.decode.blocks.block_transfers import BlockPair, BlockTransfers
from workers.groups.rank_messages import (
    AwaitArrival,
    BlocksFetched,
    LoadBlocks,
    PromptReserved,
    RankResult,
    RankWork,
    ReleaseSequence,
    ReserveAndFetch,
    ReservePrompt,
    SaveToHost,
    StoreBlocks,
)
from workers.kvcache.reserving import reserve_prompt

_PROMOTIONS_TIMEOUT_S = 1.0
"""Seconds in which the pool must promote those blocks of a store that it has only on SSD.

A store does not wait for room in the pool, because other sequences wait for the stored device pages.
"""


@dataclass(slots=True)
class _Holding:
    reservation: Reservation | None = None
    keys: Sequence[BlockKey] = ()
    saved: list[torch.Tensor] = field(default_factory=list)

    @property
    def reserved(self) -> Reservation:
        if self.reservation is None:
            raise PoolError("the sequence has no pages in this rank's pool")
        return self.reservation


class SequenceBlocks:
    """The blocks of all sequences in one rank. `close` also closes `transfers`."""

    def __init__(self, pool: WorkerClient, transfers: BlockTransfers) -> None:
        self._pool, self._transfers = pool, transfers
        self._holdings: dict[int, _Holding] = {}
        self.num_sealed_blocks = 0
        """The number of stored blocks of answers, inlined prompts and pre-copies, without parked blocks."""

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has blocks or saved pages in this rank."""
        return not self._holdings

    def num_reserved_pages(self, number: int) -> int:
        """Return how many pool pages were reserved for a sequence: one for each missing block."""
        holding = self._holdings.get(number)
        if holding is None or holding.reservation is None:
            return 0
        return _num_missing(holding.reservation)

    def close(self) -> None:
        """Refuse further work."""
        self._transfers.close()

    async def perform(self, work: RankWork) -> RankResult | None:
        """Perform `work` on a sequence, and return its result. Raises PoolError or TransferError."""
        holding = self._holdings.setdefault(work.number, _Holding())
        match work:
            case ReservePrompt():
                return await self._reserve_prompt(holding, work)
            case AwaitArrival():
                await self._pool.wait_arrived(holding.reserved.reservation_id)
            case ReserveAndFetch():
                return await self._fetch(holding, work)
            case LoadBlocks(pages=pages) if holding.saved:
                await self._transfers.restore(pages, holding.saved)
                holding.saved = []
            case LoadBlocks(pages=pages):
                await self._load(holding, pages)
            case StoreBlocks():
                await self._store(holding, work)
            case SaveToHost(pages=pages):
                holding.saved = await self._transfers.save(pages)
            case ReleaseSequence(number=number):
                if holding.reservation is not None:
                    await self._pool.release(holding.reservation.reservation_id)
                self._holdings.pop(number, None)  # only now: a cancelled release is repeated
        return None

    async def _reserve_prompt(self, holding: _Holding, work: ReservePrompt) -> PromptReserved:
        block_size = self._pool.segment.layout.block_size
        reservation = await reserve_prompt(self._pool, work.request, block_size)
        holding.reservation, holding.keys = reservation, work.request.block_keys
        grant = await self._pool.grant(reservation.reservation_id)
        cached = itertools.takewhile(lambda block: block.sealed, reservation.blocks)
        return PromptReserved(grant, [block.tier for block in cached])

    async def _fetch(self, holding: _Holding, work: ReserveAndFetch) -> BlocksFetched:
        if holding.reservation is not None:
            await self._pool.release(holding.reservation.reservation_id)
            holding.reservation = None
        reservation = await self._pool.reserve(work.keys, 0, work.tenant)
        holding.reservation, holding.keys = reservation, work.keys
        lacking = [index for index, block in enumerate(reservation.blocks) if not block.sealed]
        are_there = [block.sealed for block in reservation.blocks]
        if lacking:
            nums_layers = await self._pool.fetch_ahead(reservation.reservation_id, work.shards, lacking)
            for index, num_layers in zip(lacking, nums_layers, strict=True):
                are_there[index] = num_layers == self._pool.segment.layout.num_layers
        return BlocksFetched(sum(itertools.takewhile(bool, are_there)))

    async def _load(self, holding: _Holding, pages: list[int]) -> None:
        if not pages:
            return
        blocks = holding.reserved.blocks[: len(pages)]
        damaged = await self._transfers.load(
            [BlockPair(page, block.page) for page, block in zip(pages, blocks, strict=True)]
        )
        if damaged:
            keyed = zip(holding.keys, blocks, strict=False)
            await self._pool.verify([key for key, block in keyed if block.page in damaged])
            raise PoolError(f"{len(damaged)} blocks were damaged in the pool and have been dropped")

    async def _store(self, holding: _Holding, work: StoreBlocks) -> None:
        """Store blocks whose device pages no iteration writes. Raises PoolFullError if there is no room."""
        if not work.keys and not work.num_private:
            return
        reservation = await self._reserve(work.keys, work.num_private, work.tenant)
        try:
            if self._pool.wants_token_ids and work.tokens is not None:
                await self._pool.describe_tokens(reservation.reservation_id, work.tokens)
            missing = [
                BlockPair(device_page, block.page)
                for device_page, block in zip(work.pages, reservation.blocks, strict=False)
                if not block.sealed
            ]
            checksums = await self._transfers.store(missing)
            layers = range(self._pool.segment.layout.num_layers)
            pages = [block.pool_page for block in missing]
            await self._pool.commit(reservation.reservation_id, layers, pages, checksums)
            await self._pool.settled()  # else checksums might be missing when the blocks are loaded again
        except BaseException:
            await self._pool.release(reservation.reservation_id)
            raise
        if work.is_parked:
            holding.reservation, holding.keys = reservation, work.keys
        else:
            await self._pool.release(reservation.reservation_id)
            self.num_sealed_blocks += _num_missing(reservation)

    async def _reserve(self, keys: list[BlockKey], num_private: int, tenant: str) -> Reservation:
        try:
            async with asyncio.timeout(_PROMOTIONS_TIMEOUT_S):
                return await self._pool.reserve(keys, num_private, tenant)
        except TimeoutError:
            reason = f"the pool did not promote the blocks within {_PROMOTIONS_TIMEOUT_S:g} s"
            raise PoolFullError(reason) from None


def _num_missing(reservation: Reservation) -> int:
    return sum(not block.sealed for block in reservation.blocks)
