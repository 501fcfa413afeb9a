"""The prefill runner of an instance (Mooncake, section 3, steps 1 to 3).

The runner computes blocks that no pool holds, stores them layer by layer, and sends them to the decode side.
Each prompt has a task that gets its memory, waits for its passes and then for its transfer. One loop plans
the passes, which several prompts may share. In a pipeline this runner is in the first stage, which leads the
others.

Owns: the state of each prompt. Does not know: how requests are placed, how bytes travel, which prompt goes
first.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from mooncake.errors import MooncakeError, TransferError
from mooncake.messages.requests import Held, HeldStep, Ref
from mooncake.messages.workers import Prefill, Prefilled, WorkFailed
from workers.engine.kvcache.device_pages import OutOfPages
from workers.errors import NoRoomError, SessionLostError, report_of
from workers.execution.draws import FirstToken
from workers.execution.jobs import Jobs
from workers.groups.stage_messages import AboutJob, FirstDrawn, StageFailed, Unusable
from workers.prefill.job import PrefillJob
from workers.prefill.pass_pace import PassPace
from workers.prefill.queue import PrefillQueue, PromptState, QueuedChunk, QueuedPrompt
from workers.prefill.stage import Stage

log = logging.getLogger(__name__)
Send = Callable[[Prefilled | WorkFailed], Awaitable[None]]


class PrefillRunner:
    """The runner of a prefill instance. It answers each `Prefill` order with `Prefilled` or `WorkFailed`.

    `run` closes `stage` in the end. `why_not` returns the reason why no prompt can be computed now; empty if
    prompts can. `on_helper_lost` is called when a pass has no result because a helper that has layers is
    lost; it calls `hold`. `is_decoding` returns whether the device also decodes, so that passes must be
    short.
    """

    def __init__(
        self,
        stage: Stage,
        queue: PrefillQueue,
        send: Send,
        jobs: Jobs,
        why_not: Callable[[], str],
        on_helper_lost: Callable[[], None],
        is_decoding: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stage, self._queue = stage, queue
        self._send = send
        self._jobs, self._why_not, self._on_helper_lost = jobs, why_not, on_helper_lost
        self._is_decoding = is_decoding
        self._job_of: dict[QueuedPrompt, PrefillJob] = {}
        self._job_ids = itertools.count(1)
        self._admitting: list[QueuedPrompt] = []
        """Prompts that wait for memory: one and, where passes can cut in, a small one beside it."""
        self._ready = asyncio.Event()
        self._is_held, self._is_quiet = False, asyncio.Event()
        self._unanswered: set[Ref] = set()
        """Orders whose results have not been sent to the Conductor."""
        self.num_prompts = 0
        """The number of prompts at this instance, whether they are computed or wait."""
        self.num_tokens: Counter[str] = Counter()
        """Prompt tokens of finished prefills by source (`PREFILL_SOURCES`)."""
        self.seconds = 0.0
        """Total seconds of passes."""
        self.pace = PassPace()

    def start(self, order: Prefill) -> None:
        """Queue a prompt. `Jobs.cancel` stops its work and releases everything."""
        self._jobs.start(order.ref, lambda: self._serve(order))

    @property
    def held(self) -> list[Held]:
        """The prompts to report to another Conductor: those whose results have not been sent."""
        return [Held(ref, HeldStep.PROMPT) for ref in self._jobs.going_on if ref in self._unanswered]

    @property
    def most_pages(self) -> int:
        """The most device pages that any prompt here needs, waiting prompts included."""
        num_tokens = (len(job.order.request.token_ids) for job in self._job_of.values())
        return -(-max(num_tokens, default=0) // self._stage.page_size)

    async def hear(self, message: AboutJob) -> None:
        """Handle a message of later stages.

        Messages of earlier rounds, or about ended prompts, are dropped.
        """
        self._stage.hear(message)
        job = self._stage.jobs.get(message.job_id)
        match message:
            case FirstDrawn(round=round_, token=token, logprobs=logprobs):
                if job is not None and job.round == round_:
                    job.end_round(FirstToken(token, logprobs))
            case Unusable(round=round_):
                if job is not None and job.round == round_:
                    job.end_round(None)
            case StageFailed(reason=reason):
                if job is not None:
                    job.scope.fail(TransferError(reason))

    async def run(self) -> None:
        """Plan and compute passes until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._queue.num_stages = 2 if self._stage.has_helper else 1
                chunks, began_s = self._planned(self._queue.plan), loop.time()
                if chunks:
                    if self._stage.can_cut_in:
                        await self._compute_with_cut_ins(chunks)
                    else:
                        await self._compute(chunks)
                    self.seconds += loop.time() - began_s
                else:
                    if self._is_held:
                        self._is_quiet.set()
                    self._ready.clear()
                    await self._ready.wait()
        finally:
            self._stage.close()

    # -- pauses -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Begin no further pass until `resume`."""
        self._is_held = True
        self._is_quiet.clear()
        self._ready.set()

    async def quiet(self) -> None:
        """Wait until no pass runs, and no page is stored any more. To be called after `hold`."""
        await self._is_quiet.wait()
        await self._stage.stores_end()

    def resume(self) -> None:
        """Begin passes again, perhaps with pages in another arrangement."""
        self._is_held = False
        self._ready.set()
        self.recheck_pages()

    async def free_beyond(self, num_pages: int) -> None:
        """Wait until no prompt has a device page with the number `num_pages` or higher.

        Prompts that have such a page are preempted. To be called while these pages are closed.
        """
        await self._stage.device_pages.free_beyond(num_pages)

    def recheck_pages(self) -> None:
        """Check again whether prompts that wait for device pages can have some."""
        self._stage.device_pages.recheck()

    def _planned(self, plan: Callable[[], list[QueuedChunk]]) -> list[QueuedChunk]:
        """Return the next pass; an empty one during a pause."""
        return [] if self._is_held else plan()

    # -- one prompt ---------------------------------------------------------------------------------

    async def _serve(self, order: Prefill) -> None:
        self.num_prompts += 1
        self._unanswered.add(order.ref)
        try:
            if reason := self._why_not():
                raise NoRoomError(reason)
            await self._prefill(order)
        except SessionLostError:
            raise  # a stage is gone: this worker's session ends, and its prompts are placed again
        except (MooncakeError, OutOfPages) as error:
            if self._stage.pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("prefill of %s failed: %s", order.ref.request_id, error)
            self._unanswered.discard(order.ref)
            await self._send(report_of(order.ref, error))
        finally:
            self.num_prompts -= 1
            self._unanswered.discard(order.ref)

    async def _prefill(self, order: Prefill) -> None:
        now_s = asyncio.get_running_loop().time()
        request = order.request
        stage, num_tokens = self._stage, len(request.token_ids)
        num_reusable = min(order.num_reusable_blocks * stage.page_size, num_tokens - 1)
        queued = self._queue.add(
            num_tokens,
            order.time_left_s,
            now_s,
            request.priority,
            request.flow,
            num_reusable,
            request.block_keys,
            is_alone=order.alone,
        )
        job = stage.job(next(self._job_ids), order, queued)
        job.times.note_queued()
        self._job_of[queued] = job
        try:
            async with stage.serving(job):
                try:
                    await self._admit(queued, job)
                    first = await self._first_token(queued, job)
                    await stage.store(job)
                    self._queue.remove(queued)
                    self._admit_next()  # prompts may wait for this one's blocks
                    self.num_tokens += job.num_tokens_by_source(stage.page_size)
                    self._unanswered.discard(order.ref)
                    await self._send(Prefilled(order.ref, first.token, job.num_cached_tokens, first.logprobs))
                    await stage.sent(job)
                finally:
                    self._queue.remove(queued)
        finally:
            del self._job_of[queued]
            self._leave_admission(queued)

    async def _admit(self, queued: QueuedPrompt, job: PrefillJob) -> None:
        """Wait for the prompt's turn, then for its memory."""
        self._admit_next()
        if not job.turn.is_set():  # meanwhile the prompt's blocks can come from SSD
            await self._stage.pool.prefetch(job.order.request.block_keys)
        await job.turn.wait()
        job.times.note_turn()
        await self._stage.admit(job)
        queued.num_held_blocks = job.num_held_blocks
        self._leave_admission(queued)
        await self._stage.fetch(job, self._seconds_beside_fetch(queued, job))

    async def _first_token(self, queued: QueuedPrompt, job: PrefillJob) -> FirstToken:
        """Return the prompt's first token.

        If reused blocks do not arrive, or the prompt is preempted, it is computed again from the last good
        block on.
        """
        while True:
            num_blocks = await self._stage.num_usable_blocks(job)
            if await self._stage.reuse(job, num_blocks):
                arrives = job.prefix_arrives and self._allows_long_passes
                self._queue.ready(queued, queued.num_done, prefix_arrives=arrives)
                self._ready.set()
                first = await job.result
                if first is not None:
                    return first
                queued.state = PromptState.ADMITTED
            await self._stage.recount(job, job.round + 1)
            if job.is_preempted:
                self._admitting.append(queued)
                await self._stage.device_pages.replace(job)
                self._leave_admission(queued)

    @property
    def _allows_long_passes(self) -> bool:
        """Whether a pass may have several chunks while its prompt's prefix arrives."""
        return self._stage.can_cut_in and not self._is_decoding()

    def _seconds_beside_fetch(self, queued: QueuedPrompt, job: PrefillJob) -> float:
        """Return how long the pass that waits for the prompt's prefix will probably compute."""
        source = job.order.prefix_source
        if source is None:
            return 0.0
        num_new = max(1, queued.num_tokens - source.num_blocks * self._stage.page_size)
        most = self._queue.most_next(queued, prefix_arrives=self._allows_long_passes)
        return min(num_new, most) * self.pace.seconds_per_token

    # -- admission ----------------------------------------------------------------------------------

    def _admit_next(self) -> None:
        if len(self._admitting) < (2 if self._stage.can_cut_in else 1):
            prompt = self._queue.next_to_admit(self._admitting[0] if self._admitting else None)
            if prompt is not None:
                prompt.state = PromptState.ADMITTED
                self._admitting.append(prompt)
                self._job_of[prompt].turn.set()

    def _leave_admission(self, queued: QueuedPrompt) -> None:
        """Record that a prompt has its memory or has ended, and admit further prompts."""
        if queued in self._admitting:
            self._admitting.remove(queued)
        self._admit_next()

    # -- passes -------------------------------------------------------------------------------------

    async def _compute_with_cut_ins(self, chunks: Sequence[QueuedChunk]) -> None:
        """Compute one pass, and between two of its layers the passes that `plan_cut_in` returns."""
        async with asyncio.TaskGroup() as passes:
            running = passes.create_task(self._compute(chunks))
            running.add_done_callback(lambda _: self._ready.set())
            while not running.done():
                urgent = self._planned(lambda: self._queue.plan_cut_in([chunk.prompt for chunk in chunks]))
                if urgent:
                    await self._compute(urgent, cuts_in=True)
                else:
                    self._ready.clear()
                    await self._ready.wait()

    async def _compute(self, chunks: Sequence[QueuedChunk], *, cuts_in: bool = False) -> None:
        in_pass = [(self._job_of[prompt], num_tokens) for prompt, num_tokens in chunks]
        rounds = [job.round for job, _ in in_pass]
        loop, has_helper = asyncio.get_running_loop(), self._stage.has_helper
        most_at_once = self._queue.saturating_tokens if has_helper else self._queue.prefill_chunk
        began_s = loop.time()
        computed = await self._stage.compute(in_pass, cuts_in=cuts_in, most_at_once=most_at_once)
        if computed.is_lost:
            self._on_helper_lost()  # the same prompts are in a later pass
            return
        if all(result.is_computed for result in computed.results):
            load_wait_s = in_pass[0][0].times.passes[-1].load_wait_s
            num_tokens = sum(num_tokens for _, num_tokens in in_pass)
            self.pace.note(num_tokens, loop.time() - began_s - load_wait_s)
        for (prompt, _), (job, _), result, round_ in zip(
            chunks, in_pass, computed.results, rounds, strict=True
        ):
            prompt.prefix_arrives = False
            if not prompt.num_left:
                self._queue.computed(prompt)
            if not result.is_computed:
                prompt.state = PromptState.ADMITTED
            if job.round != round_:
                continue  # a later stage lacks blocks that were to be reused
            if result.first_token is not None:
                job.end_round(result.first_token)
            elif not result.is_computed and job.lacks_reuse:
                job.end_round(None)
        self._admit_next()
        await self._stage.hand_on(computed)
