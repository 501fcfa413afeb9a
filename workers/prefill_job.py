"""A prompt that is being prefilled: its pages, what of it is in which memory, and its part of each pass.

Owns: one prompt's blocks and their way between device and pool. Does not know: the queue, other prompts.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from kvstore.messages import Reservation
from kvstore.worker_client import WorkerClient
from mooncake.messages import COMPUTED, REMOTE, Prefill
from workers.engine.batch import Chunk
from workers.layerwise import Part, PromptBlock
from workers.prefill_queue import PromptState, QueuedPrompt
from workers.prefix_fetch import PrefixFetch


class PrefillJob:
    """Made when an order comes; its memory comes with `begin`."""

    def __init__(self, order: Prefill, queued: QueuedPrompt, pool: WorkerClient, layers: range) -> None:
        self.order, self.queued = order, queued
        self.turn = asyncio.Event()
        """set when it is admitted"""
        self.outcome: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """of the passes since `reuse`: the first token, or None if what was to be reused could not be had"""
        self.num_cached_tokens = 0
        self.device_pages: list[int] = []
        self.reservation: Reservation | None = None
        self.fetch: PrefixFetch | None = None
        self.damaged_pages: list[int] = []
        """of the pool, found by loads"""
        self._pool, self._layers = pool, layers
        self._loop = asyncio.get_running_loop()
        self._blocks: list[PromptBlock] = []
        self._part: Part | None = None
        """in the pass that runs now"""
        self._pass_ended = asyncio.Event()
        self._pass_ended.set()
        self._must_load = False
        self._num_cached_blocks = 0
        self._num_expected_blocks = 0
        """of a fetch that was under way when they were counted as cached"""
        self._storing: list[Future[None]] = []
        self._committing: list[Future[None]] = []

    # -- memory -------------------------------------------------------------------------------------

    def begin(self, reservation: Reservation, device_pages: list[int]) -> None:
        """Its pages are there: one of each kind for each block."""
        self.reservation, self.device_pages = reservation, device_pages
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

    def reuse(self, page_size: int) -> None:
        """Settle what need not be computed: the longest prefix that is in the pool or, if a fetch is under
        way, on its way there. At least one token is computed: its logits are the answer's first token."""
        fetch, end = self.fetch, self._layers.stop
        expected: set[int] = set()
        if fetch is not None:
            expected.update([] if fetch.has_ended else fetch.expected_indices)
            self._take_note_of(fetch)
        self._num_expected_blocks = len(expected)
        self._num_cached_blocks = 0
        for index, block in enumerate(self._blocks):
            if block.next_layer < end and index not in expected:
                break
            self._num_cached_blocks += 1
        num_tokens = len(self.order.request.token_ids)
        self.num_cached_tokens = min(self._num_cached_blocks * page_size, num_tokens - 1)
        self.queued.num_done = self.num_cached_tokens
        self._must_load = self._num_cached_blocks > 0
        self.outcome = self._loop.create_future()

    def _take_note_of(self, fetch: PrefixFetch) -> None:
        """What has come by now, and where."""
        if fetch.error is not None:
            raise fetch.error
        for index, num_layers in zip(fetch.indices, fetch.num_layers, strict=True):
            self._blocks[index].next_layer = max(self._blocks[index].next_layer, num_layers)
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

    def join_pass(self, num_tokens: int, page_size: int) -> Part:
        """Its next tokens. Every block that they complete is stored, as far as the pool has not got it."""
        tokens, start = self.order.request.token_ids, self.queued.num_done
        end = start + num_tokens
        end_block = len(self._blocks) if end == len(tokens) else end // page_size
        # What is reused is not stored, though its last token may be computed again.
        stores = self._blocks[max(start // page_size, self._num_cached_blocks) : end_block]
        self._part = Part(
            chunk=Chunk(tokens[start:end], start, self.device_pages),
            loads=self._blocks[: self._num_cached_blocks] if self._must_load else [],
            stores=[block for block in stores if block.next_layer < self._layers.stop],
            await_pool=self._await_pool,
            on_stored=self._commit,
            storing=self._storing,
        )
        self._pass_ended.clear()
        return self._part

    def leave_pass(self, first_token: int | None) -> None:
        """The pass has ended, for a prompt that ends with it by `first_token`. Idempotent."""
        part, self._part = self._part, None
        if part is None:
            return
        self._pass_ended.set()
        self.damaged_pages += part.damaged_pages
        if part.is_dropped:
            self.queued.state = PromptState.ADMITTED
            if self.damaged_pages or self._num_expected_blocks:  # else it was aborted
                self._settle(None)
            return
        self._must_load = False
        self.queued.num_done += len(part.chunk.token_ids)
        if first_token is not None:
            self._settle(first_token)

    def drop(self) -> None:
        """Nobody wants it any more: a pass that computes only for such stops before its next layer."""
        if self._part is not None:
            self._part.is_dropped = True
        if self.fetch is not None:
            self.fetch.give_up()

    async def stored(self) -> None:
        """Returns when all that has been computed is in the pool. Raises what kept it from there."""
        await self._pass_ended.wait()
        await self._all_of(self._storing)
        await self._all_of(self._committing)
        for error in [future.exception() for future in (*self._storing, *self._committing)]:
            if error is not None:
                raise error

    async def untouched(self) -> None:
        """Returns when neither memory is read or written for it any more, however often it is cancelled."""
        for wait in (self._pass_ended.wait(), self._all_of(self._storing), self._all_of(self._committing)):
            waiting = asyncio.ensure_future(wait)
            while not waiting.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])

    async def _all_of(self, futures: Sequence[Future[None]]) -> None:
        if futures:
            await asyncio.wait([asyncio.wrap_future(future) for future in futures])

    def _settle(self, outcome: int | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # -- on transfer threads ------------------------------------------------------------------------

    def _await_pool(self, layer: int) -> bool:
        num_blocks = self._num_expected_blocks
        return not num_blocks or self.fetch is None or self.fetch.await_layer(layer, num_blocks)

    def _commit(self, layer: int, blocks: Sequence[PromptBlock], checksums: list[int]) -> None:
        assert self.reservation is not None
        commit = self._pool.commit(
            self.reservation.reservation_id,
            range(layer, layer + 1),
            [block.pool_page for block in blocks],
            [[checksum] for checksum in checksums],
        )
        self._committing.append(asyncio.run_coroutine_threadsafe(commit, self._loop))
