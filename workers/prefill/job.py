"""A prompt that is being prefilled, in one stage: its pages, what of it is in which memory, its part of each
pass.

Owns: one prompt's blocks and their way between device and pool. Does not know: the queue, other prompts, how
the stages behind are told.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.messages.pools import COMPUTED, REMOTE
from mooncake.messages.workers import Prefill
from mooncake.model.grammar import GrammarState
from workers.engine.batch import Chunk
from workers.execution.draws import FirstToken
from workers.groups.stage_messages import PassShare
from workers.kvcache.commits import Commits
from workers.kvcache.layerwise import PassPart, PromptBlock
from workers.kvcache.prefix_fetch import PrefixFetch
from workers.prefill.queue import Progress
from workers.prefill.scope import FailureScope


class PrefillJob:
    """Made when an order comes; its memory comes with `begin`. `job_id` names it in all stages.

    It is computed in *rounds*: another one begins, at the last good block, if what was to be reused fails to
    come.
    """

    def __init__(
        self,
        job_id: int,
        order: Prefill,
        progress: Progress,
        pool: WorkerClient,
        layers: range,
        *,
        is_windowed: bool = False,
    ) -> None:
        """`is_windowed`: its device pages have one layer after the other (`DeviceKVCache.window`), so each of
        its passes loads what stands before it."""
        self.job_id, self.order, self.progress = job_id, order, progress
        self.scope = FailureScope()
        self.turn = asyncio.Event()
        """set when it is admitted"""
        self.stored_behind = asyncio.Event()
        """set when it has been computed in all stages, and stored by those behind this one"""
        self.sent_behind = asyncio.Event()
        """set when the decode side has what the stages behind this one had to send"""
        self.left_behind = asyncio.Event()
        """set when no other rank uses its device pages any more"""
        self.is_dropped = False
        """it is on its way out"""
        self.num_cached_tokens = 0
        self.device_pages: list[int] = []
        self.reservation: Reservation | None = None
        self.fetch: PrefixFetch | None = None
        self.grammar: GrammarState | None = None
        """what the first token must follow, where that is drawn"""
        self.damaged_pages: list[int] = []
        """of the pool, found by loads"""
        self._pool, self._layers, self._is_windowed = pool, layers, is_windowed
        self._loop = asyncio.get_running_loop()
        self.begin_round(0)
        self._blocks: list[PromptBlock] = []
        self._part: PassPart | None = None
        """in the pass that runs now"""
        self._pass_ended = asyncio.Event()
        self._pass_ended.set()
        self._must_load = False
        self._num_cached_blocks = 0
        self._num_expected_blocks = 0
        """of a fetch that was under way when they were counted as cached"""
        self._storing: deque[Future[None]] = deque()
        self._commits = Commits(layers, pool.segment.layout.layer_bytes, self._commit)
        self._committing: deque[Future[None]] = deque()

    # -- rounds -------------------------------------------------------------------------------------

    def begin_round(self, number: int) -> None:
        """What is reused is still to be settled, by `reuse`."""
        self.round = number
        self.is_settled = False
        """whether it is known what is reused in this round"""
        self.outcome: asyncio.Future[FirstToken | None] = self._loop.create_future()
        """of this round: the first token, or None if what was to be reused could not be had"""
        self.usable_behind: asyncio.Future[int] = self._loop.create_future()
        """how many blocks the stages behind need not compute in this round"""

    def end_round(self, outcome: FirstToken | None) -> None:
        """Idempotent: the first `outcome` counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # -- memory -------------------------------------------------------------------------------------

    def begin(self, device_pages: list[int]) -> None:
        """Its pages are there: one of each kind for each block."""
        reservation, self.device_pages = self.reservation, device_pages
        assert reservation is not None
        first, end = self._layers.start, self._layers.stop
        self._blocks = [
            PromptBlock(device_page, block.page, end if block.sealed else first)
            for device_page, block in zip(device_pages, reservation.blocks, strict=True)
        ]

    def missing_blocks(self, num_blocks: int) -> list[int]:
        """Those of the first `num_blocks` with a key that the own pool lacks."""
        assert self.reservation is not None
        num_keyed = len(self.order.request.block_keys)
        blocks = self.reservation.blocks[: min(num_blocks, num_keyed)]
        return [index for index, block in enumerate(blocks) if not block.sealed]

    def num_usable_blocks(self) -> int:
        """Of the longest prefix that is in the pool or, if a fetch is under way, on its way there."""
        if self.fetch is not None:
            self._take_note_of(self.fetch)
        expected, end = self._expected_indices, self._layers.stop
        for index, block in enumerate(self._blocks):
            if block.next_layer < end and index not in expected:
                return index
        return len(self._blocks)

    def reuse(self, num_blocks: int, page_size: int) -> None:
        """Settle that `num_blocks` need not be computed, which are no more than are usable.

        At least one token is computed: its logits are the answer's first token.
        """
        self.is_settled = True
        self._num_cached_blocks = num_blocks
        self._num_expected_blocks = len(self._expected_indices)
        num_tokens = len(self.order.request.token_ids)
        self.num_cached_tokens = min(num_blocks * page_size, num_tokens - 1)
        self.progress.num_done = self.num_cached_tokens
        self._must_load = num_blocks > 0

    def fetches_beyond(self, num_blocks: int) -> bool:
        """Whether blocks behind the first `num_blocks` are still on their way."""
        return any(index >= num_blocks for index in self._expected_indices)

    @property
    def _expected_indices(self) -> set[int]:
        """Blocks that a fetch is going to bring."""
        fetch = self.fetch
        return set() if fetch is None or fetch.has_ended else set(fetch.expected_indices)

    def _take_note_of(self, fetch: PrefixFetch) -> None:
        """What has come by now, and where."""
        if fetch.error is not None:
            raise fetch.error
        for index, num_layers in zip(fetch.indices, fetch.num_layers, strict=True):
            block = self._blocks[index]
            block.next_layer = max(block.next_layer, self._layers.start + num_layers)
        for index, page in zip(fetch.indices, fetch.pages or [], strict=False):
            block = self._blocks[index]
            if block.pool_page != page:
                block.pool_page, block.next_layer = page, self._layers.start

    def num_tokens_by_source(self, page_size: int) -> Counter[str]:
        """Where the prompt's KVCache came from (`PREFILL_SOURCES`), in tokens."""
        assert self.reservation is not None
        sources: Counter[str] = Counter()
        for index in range(self._num_cached_blocks):
            tier = self.reservation.blocks[index].tier
            num_tokens = min(page_size, self.num_cached_tokens - index * page_size)
            sources[tier.value if tier is not None else REMOTE] += num_tokens
        sources[COMPUTED] += len(self.order.request.token_ids) - self.num_cached_tokens
        return sources

    # -- passes -------------------------------------------------------------------------------------

    def share(self, num_tokens: int) -> PassShare:
        """What the stages behind are told of its part of a pass, before it joins that."""
        return PassShare(self.job_id, self.round, self._num_cached_blocks, self.progress.num_done, num_tokens)

    def join_pass(self, num_tokens: int, page_size: int) -> PassPart:
        """Its next tokens. Every block that they complete is stored, as far as the pool has not got it."""
        tokens, start = self.order.request.token_ids, self.progress.num_done
        end = start + num_tokens
        end_block = len(self._blocks) if end == len(tokens) else end // page_size
        # What is reused is not stored, though its last token may be computed again.
        stores = self._blocks[max(start // page_size, self._num_cached_blocks) : end_block]
        self._part = PassPart(
            chunk=Chunk(tokens[start:end], start, self.device_pages),
            loads=self._blocks[: self._num_to_load(start, page_size)],
            stores=[block for block in stores if block.next_layer < self._layers.stop],
            await_pool=self._await_pool,
            on_stored=self._stored,
            storing=self._storing,
            is_dropped=self.is_dropped,
        )
        self._pass_ended.clear()
        return self._part

    def _num_to_load(self, start: int, page_size: int) -> int:
        """Blocks before token `start` that are not on the device, or will not be when their layer comes."""
        if self._is_windowed:
            return -(-start // page_size)
        return self._num_cached_blocks if self._must_load else 0

    def leave_pass(self, *, is_computed: bool) -> None:
        """The pass has ended."""
        part, self._part = self._part, None
        assert part is not None
        self._pass_ended.set()
        for futures in (self._storing, self._committing):  # of a long prompt there would be thousands
            while futures and _has_succeeded(futures[0]):
                futures.popleft()
        self.damaged_pages += part.damaged_pages
        if is_computed:
            self._must_load = False
            self.progress.num_done += len(part.chunk.token_ids)

    @property
    def lacks_reuse(self) -> bool:
        """Whether its part of a pass was dropped because something did not come; else it was aborted."""
        return bool(self.damaged_pages or self._num_expected_blocks)

    def drop(self) -> None:
        """Nobody wants it any more: a pass that computes only for such stops before its next layer."""
        self.is_dropped = True
        if self._part is not None:
            self._part.is_dropped = True
        if self.fetch is not None:
            self.fetch.give_up()

    async def left_pass(self) -> None:
        """Returns when it is in no pass."""
        await self._pass_ended.wait()

    async def stored(self) -> None:
        """Returns when all that has been computed is in the pool. Raises what kept it from there."""
        await self.left_pass()
        await self._all_of(self._storing)
        await self._all_of(self._committing)
        for error in [future.exception() for future in (*self._storing, *self._committing)]:
            if error is not None:
                raise error

    async def untouched(self) -> None:
        """Returns when neither memory is read or written for it any more, however often it is cancelled."""
        for end in (self._pass_ended.wait(), self._all_of(self._storing), self._all_of(self._committing)):
            waiting = asyncio.ensure_future(end)
            while not waiting.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])

    async def _all_of(self, futures: Collection[Future[None]]) -> None:
        if futures:
            await asyncio.wait([_watched(future) for future in tuple(futures)])

    # -- on transfer threads ------------------------------------------------------------------------

    def _await_pool(self, layer: int) -> bool:
        num_blocks = self._num_expected_blocks
        first = self._layers.start
        if self._is_windowed and layer == first:
            wait(tuple(self._storing))  # of the passes before: what they have computed is loaded
        return not num_blocks or self.fetch is None or self.fetch.await_layer(layer - first, num_blocks)

    def _stored(self, layer: int, blocks: Sequence[PromptBlock], checksums: list[int]) -> None:
        self._commits.stored(layer, [block.pool_page for block in blocks], checksums)

    def _commit(self, layers: range, pages: list[int], checksums: list[list[int]]) -> None:
        assert self.reservation is not None
        first = self._layers.start
        commit = self._pool.commit(
            self.reservation.reservation_id,
            range(layers.start - first, layers.stop - first),
            pages,
            checksums,
        )
        self._committing.append(asyncio.run_coroutine_threadsafe(commit, self._loop))


def _watched(future: Future[None]) -> asyncio.Future[None]:
    """Its end. Its error is said by `stored`, if anybody still wants to know."""
    watched = asyncio.wrap_future(future)
    watched.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return watched


def _has_succeeded(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
