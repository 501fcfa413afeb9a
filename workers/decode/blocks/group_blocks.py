"""The KVCache of a group's sequences: all ranks perform the same work on a sequence's blocks.

A worker that is alone is a group of one rank.

Owns: the calls to all ranks, and the choice of the pages for each call. Does not know: the batch, when and
why blocks are copied.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

import msgspec

from mooncake.errors import TransferError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import COMPUTED, Grant, PoolShard, Tier
from workers.decode.blocks.sequence_blocks import SequenceBlocks
from workers.decode.sequence import Sequence
from workers.execution.jobs import together
from workers.groups.followers import Followers
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


class ReservedPages(NamedTuple):
    """The pages of a prompt in the pools of all ranks.

    `grant` is the permission to write the missing blocks. `cached_tiers` has the tier of each leading block
    that every rank's pool has.
    """

    grant: Grant
    cached_tiers: list[Tier | None]

    def num_tokens_by_source(self, num_tokens: int, page_size: int) -> Counter[str]:
        """Return a prompt's tokens by the source of their KVCache (`PREFILL_SOURCES`).

        Tokens without KVCache count as computed here. The last token always counts as computed here.
        """
        sources: Counter[str] = Counter()
        for index, tier in enumerate(self.cached_tiers):
            assert tier is not None
            sources[tier.value] += min(page_size, num_tokens - 1 - index * page_size)
        sources[COMPUTED] = num_tokens - sources.total()
        return sources


class GroupBlocks:
    """The blocks of all sequences in all ranks of a group. `own` has the blocks of this rank.

    When a method returns or raises, all ranks have ended its work, except after the loss of a rank.
    """

    def __init__(
        self, own: SequenceBlocks, followers: Followers | None, page_size: int, arrival_timeout_s: float
    ) -> None:
        self._own, self._followers = own, followers
        self._page_size, self._arrival_timeout_s = page_size, arrival_timeout_s

    @property
    def num_sealed_blocks(self) -> int:
        """The number of blocks that this rank has stored for other requests or instances.

        The blocks are of answers, inlined prompts and pre-copies.
        """
        return self._own.num_sealed_blocks

    def num_reserved_pages(self, sequence: Sequence) -> int:
        """Return how many pool pages of this rank were reserved for a sequence."""
        return self._own.num_reserved_pages(sequence.number)

    def close(self) -> None:
        """Refuse further work."""
        self._own.close()

    async def reserve(self, sequence: Sequence) -> ReservedPages:
        """Reserve pool pages for a sequence's prompt, waiting for room."""
        results = await self._perform(ReservePrompt(sequence.number, sequence.request))
        own, *others = [result for result in results if isinstance(result, PromptReserved)]
        grant = msgspec.structs.replace(own.grant, others=tuple(other.grant for other in others))
        num_cached = min(len(rank.cached_tiers) for rank in (own, *others))
        return ReservedPages(grant, own.cached_tiers[:num_cached])

    async def wait_arrived(self, sequence: Sequence) -> None:
        """Wait until the prompt's KVCache has arrived in all ranks.

        Raises TransferError if the KVCache's sender was lost, or if the KVCache is late
        (`arrival_timeout_s`).
        """
        try:
            async with asyncio.timeout(self._arrival_timeout_s):
                await self._perform(AwaitArrival(sequence.number))
        except TimeoutError:
            raise TransferError(f"the KVCache did not arrive within {self._arrival_timeout_s:g} s") from None

    async def fetch(self, sequence: Sequence, keys: list[BlockKey], shards: tuple[PoolShard, ...]) -> int:
        """Fetch from another instance the blocks that the ranks' pools lack.

        Returns how many leading blocks all ranks have after the fetch.
        """
        results = await self._perform(ReserveAndFetch(sequence.number, keys, shards, sequence.request.tenant))
        return min(result.num_blocks for result in results if isinstance(result, BlocksFetched))

    async def load(self, sequence: Sequence) -> None:
        """Load the sequence's KVCache into its device pages, while iterations run."""
        await self.load_to(sequence, self._filled_pages(sequence))

    async def load_to(self, sequence: Sequence, pages: list[int]) -> None:
        """Load the sequence's first blocks from the pools into the device pages `pages`."""
        await self._perform(LoadBlocks(sequence.number, pages))

    async def store(self, sequence: Sequence, *, is_parked: bool) -> None:
        """Store the sequence's full blocks in the pool.

        If `is_parked`, the partial block is stored too, in a page without a key, and the blocks stay reserved
        for the sequence. Raises PoolError.
        """
        keys, pages = sequence.keys(self._page_size), self._filled_pages(sequence)
        num_private = len(pages) - len(keys) if is_parked else 0
        tokens = None if sequence.request.is_salted else sequence.tokens[: len(keys) * self._page_size]
        tenant = sequence.request.tenant
        sequence.num_stores += 1
        try:
            await self._perform(
                StoreBlocks(sequence.number, keys, num_private, pages, tokens, is_parked, tenant)
            )
        finally:
            sequence.num_stores -= 1

    async def save_to_host(self, sequence: Sequence) -> None:
        """Copy the sequence's KVCache to host memory, for a later `load`."""
        await self._perform(SaveToHost(sequence.number, self._filled_pages(sequence)))

    async def release(self, sequence: Sequence) -> None:
        """Release a sequence's pool pages and saved copies in all ranks."""
        await self._perform(ReleaseSequence(sequence.number))

    def _filled_pages(self, sequence: Sequence) -> list[int]:
        return sequence.pages[: -(-sequence.num_kv_tokens // self._page_size)]

    async def _perform(self, work: RankWork) -> list[RankResult | None]:
        """Perform `work` in all ranks. Returns their results, this rank's first."""
        own = self._own.perform(work)
        if self._followers is None:
            return [await own]
        result, others = await together(own, self._followers.call(work))
        return [result, *others]
