"""A prompt that is being prefilled in one stage: its pages, its blocks in pool and device, its passes.

Owns: one prompt's blocks and their copies between device and pool. Does not know: the queue, other prompts,
messages to later stages.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import COMPUTED, REMOTE
from mooncake.messages.workers import Prefill
from mooncake.model.grammar import GrammarState
from workers.engine.batch import Chunk
from workers.execution.draws import FirstToken
from workers.groups.stage_messages import ChunkRange
from workers.kvcache.commits import Commits
from workers.kvcache.layerwise import PassPart, PromptBlock
from workers.kvcache.prefix_fetch import PrefixFetch
from workers.prefill.prompt_times import PromptTimes
from workers.prefill.queue import PromptProgress
from workers.prefill.scope import FailureScope


class PrefillJob:
    """One prompt in one stage, from its order to its end. All stages know the prompt by its `job_id`.

    `begin` sets the prompt's memory. The prompt is computed in *rounds*: if blocks that were to be reused do
    not arrive, another round begins at the last good block.
    """

    def __init__(
        self,
        job_id: int,
        order: Prefill,
        progress: PromptProgress,
        pool: WorkerClient,
        layers: range,
        *,
        is_windowed: bool = False,
    ) -> None:
        """Make the job of a prefill order.

        With `is_windowed`, layers take turns in the prompt's device pages (`DeviceKVCache.window`), so each
        pass loads all blocks before its tokens.
        """
        self.job_id, self.order, self.progress = job_id, order, progress
        self.scope, self.times = FailureScope(), PromptTimes()
        self.turn = asyncio.Event()
        """Set when the prompt may get memory."""
        self.stored_behind = asyncio.Event()
        """Set when all stages have computed the prompt, and all later stages have stored it."""
        self.sent_behind = asyncio.Event()
        """Set when the decode side has the blocks of all later stages."""
        self.left_by_ranks = asyncio.Event()
        """Set when no other rank uses the prompt's device pages any more."""
        self.is_dropped = False
        """Whether the prompt was aborted or has failed."""
        self.is_preempted = False
        """Whether the prompt gives its device pages up, and goes on with others in another round."""
        self.num_cached_tokens = 0
        """The number of tokens whose KVCache is reused, and was not computed in an earlier round."""
        self.device_pages: list[int] = []
        self.reservation: Reservation | None = None
        self.fetch: PrefixFetch | None = None
        self.grammar: GrammarState | None = None
        """The state of the request's grammar, in the stage that draws the first token; else None."""
        self.damaged_pages: list[int] = []
        """Pool pages that loads have found damaged."""
        self._pool, self._layers, self._is_windowed = pool, layers, is_windowed
        self._loop = asyncio.get_running_loop()
        self._blocks: list[PromptBlock] = []
        self._part: PassPart | None = None
        """The prompt's part of the pass that runs now."""
        self._pass_ended = asyncio.Event()
        self._pass_ended.set()
        self._must_load = False
        """Whether the next pass has to load the reused blocks.

        The first pass of a round loads them. Later passes find them in the device pages.
        """
        self._num_uncomputed = len(order.request.token_ids)
        """The number of leading tokens that have been computed in no round."""
        self._num_cached_blocks = 0
        self._num_expected_blocks = 0
        """The number of blocks that count as cached although their fetch has not ended."""
        self._storing: deque[Future[None]] = deque()
        self._commits = Commits(layers, self.layout.layer_bytes, self._commit)
        self._committing: deque[Future[None]] = deque()
        self.begin_round(0)

    # -- rounds -------------------------------------------------------------------------------------

    def begin_round(self, number: int) -> None:
        """Begin round number `number`. `reuse` then settles the reused blocks."""
        self.round = number
        self.is_settled = False
        """Whether the reused blocks of this round are known."""
        self.result: asyncio.Future[FirstToken | None] = self._loop.create_future()
        """The round's result: the first token, or None if blocks that were to be reused did not arrive."""
        self.usable_behind: asyncio.Future[int] = self._loop.create_future()
        """The number of leading blocks that all later stages can reuse in this round."""

    def end_round(self, result: FirstToken | None) -> None:
        """End the round with a result. Idempotent: only the first `result` counts."""
        if not self.result.done():
            self.result.set_result(result)

    def preempt(self) -> None:
        """End the round of a prompt without its result, as its device pages are needed. Idempotent.

        A prompt whose result is known keeps its pages until they are stored.
        """
        if not self.result.done() or self.result.result() is None:
            self.is_preempted = True
            self.end_round(None)

    # -- memory -------------------------------------------------------------------------------------

    @property
    def instance(self) -> str:
        """The name of the instance, or of the stage or rank, that computes the prompt here."""
        return self._pool.address.instance

    @property
    def layout(self) -> KVLayout:
        """The layout of this stage's shard of a block."""
        return self._pool.segment.layout

    def begin(self, device_pages: list[int]) -> None:
        """Set the prompt's memory: a device page and a pool page for each block."""
        reservation, self.device_pages = self.reservation, device_pages
        assert reservation is not None
        first, end = self._layers.start, self._layers.stop
        self._blocks = [
            PromptBlock(device_page, block.page, end if block.sealed else first)
            for device_page, block in zip(device_pages, reservation.blocks, strict=True)
        ]
        self.times.note_memory()

    def replace_pages(self, device_pages: list[int]) -> None:
        """Set other device pages, as many as before, after the prompt was preempted."""
        self.device_pages, self.is_preempted = device_pages, False
        for block, page in zip(self._blocks, device_pages, strict=True):
            block.device_page = page

    @property
    def num_held_blocks(self) -> int:
        """The number of leading keyed blocks that the stage's pool held when pages were reserved."""
        assert self.reservation is not None
        blocks = self.reservation.blocks[: len(self.order.request.block_keys)]
        return next((index for index, block in enumerate(blocks) if not block.sealed), len(blocks))

    def missing_blocks(self, num_blocks: int) -> list[int]:
        """Return the indices of keyed blocks that this stage's pool lacks, among the first `num_blocks`."""
        assert self.reservation is not None
        num_keyed = len(self.order.request.block_keys)
        blocks = self.reservation.blocks[: min(num_blocks, num_keyed)]
        return [index for index, block in enumerate(blocks) if not block.sealed]

    def num_usable_blocks(self) -> int:
        """Return the length of the longest prefix that is in the pool or being fetched, in blocks.

        Raises the error of a fetch that failed at this worker's messenger.
        """
        if self.fetch is not None:
            self._take_note_of(self.fetch)
        expected, end = self._expected_indices, self._layers.stop
        for index, block in enumerate(self._blocks):
            if block.next_layer < end and index not in expected:
                return index
        return len(self._blocks)

    def reuse(self, num_blocks: int, page_size: int) -> None:
        """Settle that the first `num_blocks` blocks are reused in this round. All of them must be usable.

        At least one token is computed, because its logits are needed for the first token of the output.
        """
        self.is_settled = True
        self._num_cached_blocks = num_blocks
        self._num_expected_blocks = len(self._expected_indices)
        num_tokens = len(self.order.request.token_ids)
        self.progress.num_done = min(num_blocks * page_size, num_tokens - 1)
        self._num_uncomputed = min(self._num_uncomputed, self.progress.num_done)
        self.num_cached_tokens = self._num_uncomputed
        self._must_load = num_blocks > 0

    def fetches_beyond(self, num_blocks: int) -> bool:
        """Return whether blocks behind the first `num_blocks` are still being fetched."""
        return any(index >= num_blocks for index in self._expected_indices)

    @property
    def prefix_arrives(self) -> bool:
        """Whether some of the reused blocks of this round are still being fetched."""
        return self._num_expected_blocks > 0

    @property
    def _expected_indices(self) -> set[int]:
        """The indices of blocks that are being fetched."""
        fetch = self.fetch
        return set() if fetch is None or fetch.has_ended else set(fetch.expected_indices)

    def _take_note_of(self, fetch: PrefixFetch) -> None:
        """Record the layers that a fetch has brought, and their pages. Raises the fetch's error."""
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
        """Return the prompt's tokens by the source of their KVCache (`PREFILL_SOURCES`)."""
        assert self.reservation is not None
        sources: Counter[str] = Counter()
        for index in range(-(-self.num_cached_tokens // page_size)):
            tier = self.reservation.blocks[index].tier
            num_tokens = min(page_size, self.num_cached_tokens - index * page_size)
            sources[tier.value if tier is not None else REMOTE] += num_tokens
        sources[COMPUTED] += len(self.order.request.token_ids) - self.num_cached_tokens
        return sources

    # -- passes -------------------------------------------------------------------------------------

    def next_range(self, num_tokens: int) -> ChunkRange:
        """Return the prompt's next chunk, `num_tokens` long, in the form for later stages.

        To be called before `join_pass`.
        """
        return ChunkRange(
            self.job_id, self.round, self._num_cached_blocks, self.progress.num_done, num_tokens
        )

    def join_pass(self, num_tokens: int, page_size: int) -> PassPart:
        """Return a pass's part with the prompt's next `num_tokens` tokens.

        The pass stores the blocks that the pool lacks.
        """
        tokens, start = self.order.request.token_ids, self.progress.num_done
        end = start + num_tokens
        end_block = len(self._blocks) if end == len(tokens) else end // page_size
        # Reused blocks are not stored, though the last token of the prompt may be computed again.
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
        self.times.note_pass(self._part)
        return self._part

    def _num_to_load(self, start: int, page_size: int) -> int:
        """Return how many leading blocks must be loaded by a pass that begins at token `start`."""
        if self._is_windowed:
            return -(-start // page_size)
        return self._num_cached_blocks if self._must_load else 0

    def leave_pass(self, *, is_computed: bool) -> None:
        """Record that the prompt's pass has ended."""
        part, self._part = self._part, None
        assert part is not None
        self._pass_ended.set()
        for futures in (self._storing, self._committing):  # a long prompt would leave thousands
            while futures and _has_succeeded(futures[0]):
                futures.popleft()
        self.damaged_pages += part.damaged_pages
        self.times.note_pass_end(part, is_computed=is_computed)
        if is_computed:
            self._must_load = False
            self.progress.num_done += len(part.chunk.token_ids)

    @property
    def lacks_reuse(self) -> bool:
        """Whether blocks that were to be reused are damaged, or have not arrived.

        If a pass gave no result for the prompt although this is False, the prompt was aborted.
        """
        return bool(self.damaged_pages or self._num_expected_blocks)

    def drop(self) -> None:
        """Give the prompt up, because it was aborted or has failed.

        A pass stops before its next layer if all of its prompts are dropped.
        """
        self.is_dropped = True
        if self._part is not None:
            self._part.is_dropped = True
        if self.fetch is not None:
            self.fetch.give_up()

    async def left_pass(self) -> None:
        """Wait until the prompt is in no pass."""
        await self._pass_ended.wait()

    async def stored(self) -> None:
        """Wait until the pool has the computed KVCache. Raises the error of a store that failed."""
        await self.left_pass()
        await self._all_of(self._storing)
        await self._all_of(self._committing)
        for error in [future.exception() for future in (*self._storing, *self._committing)]:
            if error is not None:
                raise error

    async def untouched(self) -> None:
        """Wait until this worker no longer reads or writes the prompt's pages.

        The messenger may still send from the pool's pages, and write fetched blocks to them, until the
        reservation is released. If the caller is cancelled, the wait goes on, and the cancellation is not
        raised.
        """
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
            wait(tuple(self._storing))  # this pass loads the blocks that earlier passes store
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
    """Return an asyncio future for `future`.

    `stored` reports the error, so the error may stay unread here.
    """
    watched = asyncio.wrap_future(future)
    watched.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return watched


def _has_succeeded(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
