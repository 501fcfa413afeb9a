"""Prefill: compute what no pool holds, store it layer by layer, stream it to the decode side.

Each prompt has a task that gets its memory, waits for its passes and sees its KVCache off; one loop runs
the passes, which prompts may share (Mooncake, section 3, steps 1 to 3).

Owns: prefill jobs. Does not know: who decides, how bytes travel, which prompt goes first.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from kvstore.worker_client import WorkerClient
from mooncake.errors import MooncakeError, PoolError
from mooncake.messages import Prefill, Prefilled, WorkFailed
from workers.engine.kvcache import OutOfPages
from workers.executor import CancelledOnDevice, Executor, draw
from workers.jobs import Jobs
from workers.layerwise import LayerTransfers, Part
from workers.prefill_job import PrefillJob
from workers.prefill_queue import PrefillQueue, PromptState, QueuedPrompt
from workers.prefix_fetch import PrefixFetch
from workers.reserving import reserve_prompt

log = logging.getLogger(__name__)
Send = Callable[[Prefilled | WorkFailed], Awaitable[None]]


class PrefillRunner:
    """Takes `Prefill` orders and answers each with `Prefilled` or `WorkFailed`.

    `transfers` are this runner's own; they end with `run`.
    """

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        transfers: LayerTransfers,
        prefill_chunk: int,
        send: Send,
        jobs: Jobs,
    ) -> None:
        self._executor, self._pool, self._transfers = executor, pool, transfers
        self._send = send
        self._jobs = jobs
        self._queue = PrefillQueue(prefill_chunk)
        self._job_of: dict[QueuedPrompt, PrefillJob] = {}
        self._admitted: PrefillJob | None = None
        """gets its memory just now; one at a time"""
        self._ready = asyncio.Event()
        self._pages_freed = asyncio.Event()
        self.num_waiting = 0
        """prompts that have not left yet, the running ones included"""
        self.num_tokens: Counter[str] = Counter()
        """prompt tokens of finished prefills by source (`PREFILL_SOURCES`)"""

    def start(self, order: Prefill) -> None:
        """Queue a prompt. `Jobs.cancel` stops it and gives everything back."""
        self._jobs.start(order.ref, self._serve(order))

    async def run(self) -> None:
        """The loop: plan, compute."""
        try:
            while True:
                shares = self._queue.plan()
                if shares:
                    await self._compute([(self._job_of[share.prompt], share.num_tokens) for share in shares])
                else:
                    self._ready.clear()
                    await self._ready.wait()
        finally:
            self._transfers.close()

    # -- one prompt ---------------------------------------------------------------------------------

    async def _serve(self, order: Prefill) -> None:
        self.num_waiting += 1
        try:
            await self._prefill(order)
        except (MooncakeError, OutOfPages) as error:
            if self._pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("prefill of %s failed: %s", order.ref.request_id, error)
            await self._send(WorkFailed(order.ref, str(error), retryable=True))
        finally:
            self.num_waiting -= 1

    async def _prefill(self, order: Prefill) -> None:
        now_s = asyncio.get_running_loop().time()
        queued = self._queue.add(len(order.request.token_ids), order.time_left_s, now_s)
        job = PrefillJob(order, queued, self._pool, self._executor.model.layers)
        self._job_of[queued] = job
        try:
            await self._admit(job)
            first_token = await self._first_token(job)
            await job.stored()
            self._free_device_pages(job)
            self.num_tokens += job.num_tokens_by_source(self._executor.kv.page_size)
            await self._send(Prefilled(order.ref, first_token, job.num_cached_tokens))
            assert job.reservation is not None
            await self._pool.wait_sent(job.reservation.reservation_id)
        finally:
            self._queue.remove(queued)
            job.drop()
            await job.untouched()
            self._free_device_pages(job)
            del self._job_of[queued]
            self._leave_admission(job)
            if job.reservation is not None:
                await self._pool.release(job.reservation.reservation_id)
            if job.fetch is not None:
                await job.fetch.ended(patience_s=None)  # its messenger has just ended it

    async def _admit(self, job: PrefillJob) -> None:
        """Wait for its turn, then for its memory."""
        self._admit_next()
        if not job.turn.is_set():  # time enough to bring from SSD what it has
            await self._pool.prefetch(job.order.request.block_keys)
        await job.turn.wait()
        order, page_size = job.order, self._executor.kv.page_size
        reservation = await reserve_prompt(self._pool, order.request, page_size)
        job.reservation = reservation
        await self._pool.send(reservation.reservation_id, order.grant, order.ref.request_id)
        job.begin(reservation, await self._allocate(len(reservation.blocks)))
        self._leave_admission(job)
        source = order.prefix_source
        if source is not None and source.messenger != self._pool.address:
            missing = job.missing_blocks(source.num_blocks)
            if missing:
                job.fetch = PrefixFetch(self._pool, reservation.reservation_id, source.messenger, missing)
                await job.fetch.begun()

    async def _first_token(self, job: PrefillJob) -> int:
        """Let it be computed, again from the last good block on if something to be reused fails to come."""
        while True:
            job.reuse(self._executor.kv.page_size)
            job.queued.state = PromptState.READY
            self._ready.set()
            first_token = await job.outcome
            if first_token is not None:
                return first_token
            await self._drop_damaged(job)
            if job.fetch is not None:
                await job.fetch.ended()

    async def _drop_damaged(self, job: PrefillJob) -> None:
        """Blocks of the own pool that are not what they were: the next attempt must not find them."""
        if job.damaged_pages:
            assert job.reservation is not None
            keyed = zip(job.order.request.block_keys, job.reservation.blocks, strict=False)
            await self._pool.verify([key for key, block in keyed if block.page in job.damaged_pages])
            raise PoolError(f"{len(job.damaged_pages)} cached blocks were damaged and have been dropped")

    # -- admission ----------------------------------------------------------------------------------

    def _admit_next(self) -> None:
        if self._admitted is None:
            prompt = self._queue.next_to_admit()
            if prompt is not None:
                prompt.state = PromptState.ADMITTED
                self._admitted = self._job_of[prompt]
                self._admitted.turn.set()

    def _leave_admission(self, job: PrefillJob) -> None:
        """It has its memory, or has gone: there may be room for others."""
        if self._admitted is job:
            self._admitted = None
        self._admit_next()

    async def _allocate(self, num_pages: int) -> list[int]:
        """Device pages, waiting for those of other prefills. Raises OutOfPages if these are not enough."""
        kv = self._executor.kv
        while kv.num_free_pages < num_pages and any(job.device_pages for job in self._job_of.values()):
            self._pages_freed.clear()
            await self._pages_freed.wait()
        return kv.allocate(num_pages)

    def _free_device_pages(self, job: PrefillJob) -> None:
        pages, job.device_pages = job.device_pages, []
        self._executor.kv.free(pages)
        self._pages_freed.set()

    # -- passes -------------------------------------------------------------------------------------

    async def _compute(self, shares: list[tuple[PrefillJob, int]]) -> None:
        """One pass. Aborted prompts in it are computed on while others need it."""
        page_size = self._executor.kv.page_size
        jobs = [job for job, _ in shares]
        parts = [job.join_pass(num_tokens, page_size) for job, num_tokens in shares]
        tokens: list[int | None] = [None] * len(jobs)

        def drop_all() -> None:
            for job in jobs:
                job.drop()

        try:
            tokens = await self._executor.run(lambda: self._pass_on_device(jobs, parts), on_cancel=drop_all)
        except CancelledOnDevice:
            pass
        finally:
            for job, token in zip(jobs, tokens, strict=True):
                job.leave_pass(token)
        for job in jobs:
            if not job.queued.num_left:
                self._queue.remove(job.queued)
        self._admit_next()

    def _pass_on_device(self, jobs: list[PrefillJob], parts: list[Part]) -> list[int | None]:
        """The first token of each prompt that ends with this pass."""
        logits = self._executor.prefill(parts, self._transfers)
        tokens: list[int | None] = [None] * len(jobs)
        ending = [
            index
            for index, (job, part) in enumerate(zip(jobs, parts, strict=True))
            if job.queued.num_left == len(part.chunk.token_ids) and not part.is_dropped
        ]
        if ending:
            requests = [jobs[index].order.request for index in ending]
            sampling = [request.sampling for request in requests]
            drawn = draw(logits[ending], sampling, [len(request.token_ids) for request in requests])
            for index, token in zip(ending, drawn, strict=True):
                tokens[index] = token
        return tokens
