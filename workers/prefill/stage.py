"""One stage of a prefill instance, which does its part of each prompt (Mooncake, sections 3 and 5).

An instance of one stage has all layers. In a pipeline each stage reserves, loads, computes, stores and sends
the KVCache of its own layers, and hands hidden states on to the next stage (`next_stage`). In a
tensor-parallel group each rank does the same for its own KV heads, and computes each pass with the other
ranks (`followers`).

Owns: the stage's prompts, their pages. Does not know: which prompt goes first, which stage leads.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import torch

from kernels.cpu.mailbox import HelperLost
from kvstore.client.worker_client import WorkerClient
from mooncake.config.sections import WorkerConfig
from mooncake.errors import MooncakeError, PoolError
from mooncake.messages.workers import Prefill
from mooncake.tracing.spans import why_ended
from workers.engine.tensor_parallel import RankLost
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.prefill_pass import CancelledOnDevice
from workers.groups.followers import Followers
from workers.groups.next_stage import NextStage
from workers.groups.rank_messages import PassChunk, PrefillPass
from workers.groups.stage_messages import (
    AboutJob,
    Begin,
    ChunkRange,
    End,
    PromptLeft,
    Recount,
    Sent,
    Stored,
    Usable,
)
from workers.kvcache.copies import copies_for
from workers.kvcache.layerwise import LayerTransfers, PassPart
from workers.kvcache.prefix_fetch import PrefixFetch
from workers.kvcache.reserving import reserve_prompt
from workers.prefill.first_tokens import ends_of, first_tokens
from workers.prefill.job import PrefillJob
from workers.prefill.pass_result import ChunkResult, PassResult
from workers.prefill.prompt_pages import PromptPages
from workers.prefill.prompt_span import prompt_span
from workers.prefill.queue import PromptProgress

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer


def stage_of(
    executor: Executor,
    pool: WorkerClient,
    config: WorkerConfig,
    next_stage: NextStage | None = None,
    followers: Followers | None = None,
    tracer: "Tracer | None" = None,
) -> "Stage":
    """Return a stage that loads and stores layers as `config` says."""
    copies = copies_for(executor.kv, pool.segment)
    transfers = LayerTransfers(copies, overlap=config.layerwise_overlap, window=executor.kv.window)
    return Stage(executor, pool, transfers, next_stage, followers, tracer)


class Stage:
    """The prompts of a stage and their passes. `close` ends `transfers`."""

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        transfers: LayerTransfers,
        next_stage: NextStage | None = None,
        followers: Followers | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """Make a stage.

        A first rank has `followers` and no next stage. `tracer` records the spans of prompts.
        """
        self.pool = pool
        self.jobs: dict[int, PrefillJob] = {}
        self.device_pages = PromptPages(executor.kv.pages, self.jobs)
        self._executor, self._transfers, self._next = executor, transfers, next_stage
        self._followers, self._tracer = followers, tracer
        self._behind = next_stage or followers
        """The link to the later stages or the other ranks, which compute their parts of each prompt."""

    @property
    def page_size(self) -> int:
        """The number of tokens of a block."""
        return self._executor.kv.page_size

    @property
    def layers(self) -> range:
        """The layers of this stage, numbered as in the model."""
        return self._executor.model.layers

    @property
    def can_cut_in(self) -> bool:
        """Whether a pass can cut into another pass. With later stages or other ranks it cannot."""
        return self._behind is None

    @property
    def has_helper(self) -> bool:
        """Whether another instance computes some of the layers, so that passes are cut into pieces."""
        return self._executor.has_helper_for_layers

    def job(self, job_id: int, order: Prefill, progress: PromptProgress) -> PrefillJob:
        """Return a prompt's job, which is to be run inside `serving`."""
        is_windowed = self._executor.kv.window is not None
        return PrefillJob(job_id, order, progress, self.pool, self.layers, is_windowed=is_windowed)

    def close(self) -> None:
        """End the transfers, after the last pass."""
        self._transfers.close()

    # -- a prompt's time here -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self, job: PrefillJob) -> AsyncIterator[None]:
        """Make a context in which a prompt is served.

        The prompt's memory is released at the end, even if later stages have failed.
        """
        self.jobs[job.job_id] = job
        try:
            async with job.scope:
                yield
        except BaseException as error:
            job.times.error = why_ended(error)
            job.drop()
            await self._tell_behind(End(job.job_id))
            raise
        finally:
            if self._tracer is not None and job.order.request.is_traced:
                self._tracer.record(prompt_span(job), job.order.request.span)
            job.usable_behind.cancel()  # a task that recounts for this prompt stops waiting
            await job.untouched()
            if self._followers is not None and job.device_pages:
                await self._left_by(self._followers, job)
            self._free_device_pages(job)
            del self.jobs[job.job_id]
            if job.reservation is not None:
                await self.pool.release(job.reservation.reservation_id)
            if job.fetch is not None:
                await job.fetch.ended(silence_s=None)  # the release has just ended the fetch

    async def admit(self, job: PrefillJob) -> None:
        """Allocate the prompt's memory, in all stages at the same time.

        Blocks that the stage's pool has are sent to the decode side at once. Layers of other blocks are sent
        when they are committed.

        Several stages admit prompts one after the other in the same order, so no two prompts wait for each
        other's memory. Within one stage all prompts get pool pages first, and then device pages; in a
        tensor-parallel group all prompts get device pages first.
        """
        order = job.order
        if self._next is None:  # the first token is drawn here
            job.grammar = await self._executor.follow(order.request.sampling.grammar)
        if self._followers is not None:  # followers use pages of the same numbers
            num_pages = -(-len(order.request.token_ids) // self.page_size)
            job.device_pages = await self.device_pages.allocate(num_pages)
        if self._behind is not None:
            await self._behind.send(Begin(job.job_id, order, job.device_pages or None))
        reservation = job.reservation = await reserve_prompt(self.pool, order.request, self.page_size)
        await self.pool.send(reservation.reservation_id, order.grant, order.ref.request_id)
        job.begin(job.device_pages or await self.device_pages.allocate(len(reservation.blocks)))

    async def fetch(self, job: PrefillJob, compute_s: float = 0.0) -> None:
        """Begin to fetch the blocks that this stage's pool lacks from the order's `prefix_source`.

        Returns when a pass that computes for `compute_s` seconds hardly has to wait for the last layers, or
        nothing more will arrive.
        """
        source, reservation = job.order.prefix_source, job.reservation
        assert reservation is not None
        if source is not None and all(shard.messenger != self.pool.address for shard in source.shards):
            missing = job.missing_blocks(source.num_blocks)
            if missing:
                job.fetch = PrefixFetch(self.pool, reservation.reservation_id, source.shards, missing)
                await job.fetch.begun(compute_s)

    async def num_usable_blocks(self, job: PrefillJob) -> int:
        """Return how many leading blocks this stage and all later stages can reuse in this round."""
        num_blocks = job.num_usable_blocks()
        return num_blocks if self._behind is None else min(num_blocks, await job.usable_behind)

    async def reuse(self, job: PrefillJob, num_blocks: int) -> bool:
        """Settle that the first `num_blocks` blocks are reused.

        Returns False if this stage cannot reuse them all.
        """
        if job.fetch is not None and job.fetches_beyond(num_blocks):
            await job.fetch.ended()  # the fetch must not write blocks while they are computed
        if job.num_usable_blocks() < num_blocks:
            return False
        job.reuse(num_blocks, self.page_size)
        return True

    async def recount(self, job: PrefillJob, round_: int) -> None:
        """Begin another round, after at least one stage could not reuse the blocks as planned.

        Raises PoolError if blocks were damaged.
        """
        job.begin_round(round_)
        if self._behind is not None:
            await self._behind.send(Recount(job.job_id, round_))
        await job.left_pass()
        await self._drop_damaged(job)
        if job.fetch is not None:
            await job.fetch.ended()

    async def store(self, job: PrefillJob) -> None:
        """Wait until the pools of this stage and all later stages have the prompt's KVCache."""
        await job.stored_behind.wait()
        await job.stored()
        job.times.note_stored()
        self._free_device_pages(job)

    async def sent(self, job: PrefillJob) -> None:
        """Wait until the decode side has the prompt's blocks from this stage and all later stages.

        Raises TransferError if the blocks do not arrive there. During the wait, a stage of a pipeline can
        still report that the prompt has failed.
        """
        assert job.reservation is not None
        await self.pool.wait_sent(job.reservation.reservation_id)
        job.times.note_sent()
        if self._behind is not None:
            await job.sent_behind.wait()

    def hear(self, message: AboutJob) -> None:
        """Handle a report of later stages, or of the other ranks, about a prompt, if it concerns this stage.

        A late report is dropped.
        """
        job = self.jobs.get(message.job_id)
        match message:
            case Usable(round=round_, num_blocks=num_blocks):
                if job is not None and job.round == round_ and not job.usable_behind.done():
                    job.usable_behind.set_result(num_blocks)
            case Stored():
                if job is not None:
                    job.stored_behind.set()
            case Sent():
                if job is not None:
                    job.sent_behind.set()
            case PromptLeft():
                if job is not None:
                    job.left_by_ranks.set()

    # -- memory -------------------------------------------------------------------------------------

    async def _drop_damaged(self, job: PrefillJob) -> None:
        """Drop damaged blocks from this stage's pool, so that the next attempt does not find them.

        Raises PoolError if there are any.
        """
        if job.damaged_pages:
            assert job.reservation is not None
            keyed = zip(job.order.request.block_keys, job.reservation.blocks, strict=False)
            await self.pool.verify([key for key, block in keyed if block.page in job.damaged_pages])
            raise PoolError(f"{len(job.damaged_pages)} cached blocks were damaged and have been dropped")

    def _free_device_pages(self, job: PrefillJob) -> None:
        self.device_pages.free(job)

    async def _left_by(self, followers: Followers, job: PrefillJob) -> None:
        """Wait until followers no longer use the prompt's device pages, or are lost.

        Cancelling does not end the wait.
        """
        ends = [asyncio.ensure_future(event.wait()) for event in (job.left_by_ranks, followers.lost)]
        while not any(end.done() for end in ends):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    # -- passes -------------------------------------------------------------------------------------

    async def compute(
        self,
        chunks: Sequence[tuple[PrefillJob, int]],
        hidden: torch.Tensor | None = None,
        *,
        cuts_in: bool = False,
        most_at_once: int | None = None,
    ) -> PassResult:
        """Compute one pass over the next tokens of each prompt.

        Tokens of aborted prompts are computed too, as long as other prompts need the pass.

        Args:
            chunks: For each prompt its job, and the number of tokens.
            hidden: The states `[T, hidden_size]` of the previous stage; None in the first stage.
            cuts_in: Whether the pass is computed between two layers of another pass, which has other prompts.
            most_at_once: The most tokens that a layer computes at a time, if the pass has one prompt.
        """
        assert not cuts_in or self.can_cut_in
        run = self._executor.cut_in if cuts_in else self._executor.run
        jobs = [job for job, _ in chunks]
        told = [job.next_range(num_tokens) for job, num_tokens in chunks]
        are_last = [job.progress.num_left == num_tokens for job, num_tokens in chunks]
        parts = [job.join_pass(num_tokens, self.page_size) for job, num_tokens in chunks]
        done = PassResult([ChunkResult(is_computed=False)] * len(jobs), [], None)
        announced = self._announced(told, parts, are_last)

        def drop_all() -> None:
            for job in jobs:
                job.drop()

        def compute_recorded() -> PassResult:
            with self.recorded(jobs):
                if self._followers is not None:
                    assert announced is not None
                    self._followers.announce(announced)
                states = self._executor.prefill(parts, self._transfers, hidden, most_at_once)
                return self._result(jobs, parts, told, are_last, states)

        try:
            done = await run(compute_recorded, on_cancel=drop_all)
        except CancelledOnDevice:
            pass
        except HelperLost:
            done = done._replace(is_lost=True)
        finally:
            for job, result in zip(jobs, done.results, strict=True):
                job.leave_pass(is_computed=result.is_computed)
                if result.first_token is not None and self._behind is None:
                    job.stored_behind.set()
        return done

    async def stores_end(self) -> None:
        """Wait until no store reads a device page. To be called while no pass runs."""
        await self._transfers.stores_end()

    def recorded(self, jobs: Sequence[PrefillJob | None]) -> contextlib.AbstractContextManager[None]:
        """Return a context that records, on the device thread, that a pass of `jobs` is being computed."""
        refs = [job.order.ref for job in jobs if job is not None]
        return self._executor.record.computing(
            refs, expected=(CancelledOnDevice, HelperLost, RankLost, MooncakeError)
        )

    def hidden_of(self, data: bytearray) -> torch.Tensor:
        """Return the states `[T, hidden_size]`, on the CPU, in the bytes from the previous stage."""
        model = self._executor.model
        return torch.frombuffer(data, dtype=model.dtype).view(-1, model.spec.hidden_size)

    async def hand_on(self, computed: PassResult) -> None:
        """Send a pass's states to the next stage, if there is one, and wait until it takes more."""
        if self._next is not None and computed.hidden is not None:
            await self._next.compute(computed.ranges, computed.hidden)

    def _result(
        self,
        jobs: Sequence[PrefillJob],
        parts: Sequence[PassPart],
        told: Sequence[ChunkRange],
        are_last: Sequence[bool],
        hidden: torch.Tensor,
    ) -> PassResult:
        """Return the result of a pass from the states that leave this stage's layers."""
        are_computed = [not is_dropped for is_dropped in self._executor.dropped(parts)]
        if self._next is None:
            tokens = first_tokens(self._executor.model, jobs, ends_of(parts, are_computed, are_last), hidden)
            return PassResult([ChunkResult(*o) for o in zip(are_computed, tokens, strict=True)], [], None)
        rows = torch.split(hidden, [chunk.num_tokens for chunk in told])
        wanted = [of_chunk for of_chunk, is_computed in zip(rows, are_computed, strict=True) if is_computed]
        chunks = [chunk for chunk, is_computed in zip(told, are_computed, strict=True) if is_computed]
        results = [ChunkResult(is_computed) for is_computed in are_computed]
        return PassResult(results, chunks, torch.cat(wanted).cpu() if wanted else None)

    # -- passes of a group --------------------------------------------------------------------------

    def _announced(
        self, told: Sequence[ChunkRange], parts: Sequence[PassPart], are_last: Sequence[bool]
    ) -> PrefillPass | None:
        """Return the pass in the form for followers; None if there are no followers."""
        if self._followers is None:
            return None
        chunks = []
        for part in parts:
            token_ids, start, pages = part.chunk.token_ids, part.chunk.start, part.chunk.pages
            num_pages = -(-(start + len(token_ids)) // self.page_size)
            chunks.append(PassChunk(list(token_ids), start, list(pages[:num_pages])))
        return PrefillPass(list(told), chunks, list(are_last))

    async def _tell_behind(self, message: End) -> None:
        if self._behind is not None:
            with contextlib.suppress(SessionLostError):  # then the prompt has ended there too
                await self._behind.send(message)
