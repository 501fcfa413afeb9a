"""The runner of a later stage of a prefill pipeline, which follows the first stage (Mooncake, section 5.1).

Owns: the loop of its passes, its answers. Does not know: the queue of prompts, the Conductor.
"""

import asyncio
import logging

import torch

from mooncake.errors import MooncakeError, PoolError
from workers.engine.kvcache.device_pages import OutOfPages
from workers.errors import SessionLostError
from workers.groups.previous_stage import IncomingPass, PreviousStage
from workers.groups.stage_messages import (
    AboutJob,
    Begin,
    ChunkRange,
    End,
    FirstDrawn,
    Recount,
    Sent,
    StageFailed,
    Stored,
    Unusable,
    Usable,
)
from workers.prefill.job import PrefillJob
from workers.prefill.queue import PromptProgress
from workers.prefill.stage import Stage

log = logging.getLogger(__name__)


class StageRunner:
    """A later stage's runner, which carries out and answers the messages of the previous stage.

    `run` closes `stage` in the end. The tasks of prompts run in `group`.
    """

    def __init__(self, stage: Stage, before: PreviousStage, group: asyncio.TaskGroup) -> None:
        self._stage, self._before, self._group = stage, before, group
        self._admitting = asyncio.Lock()  # first come, first served
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def obey(self, message: Begin | Recount | End) -> None:
        """Begin, recount or end a prompt. Messages about a prompt that has failed here are ignored."""
        match message:
            case Begin():
                self._tasks[message.job_id] = task = self._group.create_task(self._serve(message))
                task.add_done_callback(lambda _: self._tasks.pop(message.job_id, None))
            case Recount():
                job = self._stage.jobs.get(message.job_id)
                if job is not None and not job.is_dropped:
                    self._group.create_task(self._recount(job, message.round))
            case End():
                # A task that is cancelled before its first step runs nothing, not even its `finally`.
                asyncio.get_running_loop().call_soon(self._cancel, message.job_id)

    def _cancel(self, job_id: int) -> None:
        running = self._tasks.get(job_id)
        if running is not None and not running.cancelling():
            running.cancel()

    async def hear(self, message: AboutJob) -> None:
        """Handle a report of later stages, and pass it on if it concerns the first stage."""
        self._stage.hear(message)
        if isinstance(message, Unusable | FirstDrawn | StageFailed):
            await self._before.send(message)

    async def run(self) -> None:
        """Receive, compute and hand on passes until cancelled."""
        try:
            while True:
                incoming = await self._before.passes.get()
                await self._before.taken()
                await self._compute(incoming)
        finally:
            self._stage.close()

    # -- one prompt ---------------------------------------------------------------------------------

    async def _serve(self, begin: Begin) -> None:
        try:
            await self._follow(begin)
        except SessionLostError:
            raise
        except (MooncakeError, OutOfPages) as error:
            if self._stage.pool.closed.is_set():
                return  # the session ends, and with it all prompts here
            log.warning("prefill of %s failed: %s", begin.order.ref.request_id, error)
            await self._before.send(StageFailed(begin.job_id, str(error)))

    async def _follow(self, begin: Begin) -> None:
        stage, order = self._stage, begin.order
        progress = PromptProgress(len(order.request.token_ids))
        job = stage.job(begin.job_id, order, progress)
        job.device_pages = begin.device_pages or []
        async with stage.serving(job):
            async with self._admitting:
                await stage.admit(job)
            await stage.fetch(job)
            await self._say_usable(job)
            await stage.store(job)
            await self._before.send(Stored(job.job_id))
            await stage.sent(job)
            await self._before.send(Sent(job.job_id))

    async def _say_usable(self, job: PrefillJob) -> None:
        round_ = job.round
        num_blocks = await self._stage.num_usable_blocks(job)
        await self._before.send(Usable(job.job_id, round_, num_blocks))

    async def _recount(self, job: PrefillJob, round_: int) -> None:
        try:
            await self._stage.recount(job, round_)
            await self._say_usable(job)
        except MooncakeError as error:
            job.scope.fail(error)

    # -- passes -------------------------------------------------------------------------------------

    async def _compute(self, incoming: IncomingPass) -> None:
        """Compute one pass, without the chunks of prompts that have ended or are in another round."""
        rows = self._stage.hidden_of(incoming.hidden)
        of_chunks = torch.split(rows, [chunk.num_tokens for chunk in incoming.ranges])
        begun = []
        for chunk, of_chunk in zip(incoming.ranges, of_chunks, strict=True):
            job = self._stage.jobs.get(chunk.job_id)
            if job is not None and job.round == chunk.round and await self._begins(job, chunk):
                begun.append((job, chunk, of_chunk))
        # A prompt may have ended during the wait for another one.
        begun = [(job, chunk, of_chunk) for job, chunk, of_chunk in begun if self._wants(job, chunk)]
        if not begun:
            return
        in_pass = [(job, chunk.num_tokens) for job, chunk, _ in begun]
        chunks, hidden = [chunk for _, chunk, _ in begun], [of_chunk for _, _, of_chunk in begun]
        computed = await self._stage.compute(in_pass, torch.cat(hidden))
        for (job, _), chunk, result in zip(in_pass, chunks, computed.results, strict=True):
            if job.round != chunk.round:
                continue  # another stage lacks blocks that were to be reused
            if result.first_token is not None:
                await self._before.send(FirstDrawn(job.job_id, job.round, *result.first_token))
            elif not result.is_computed and job.lacks_reuse:
                await self._say_unusable(job)
        await self._stage.hand_on(computed)

    async def _begins(self, job: PrefillJob, chunk: ChunkRange) -> bool:
        """Settle reuse for a chunk's round. Returns False if this stage cannot compute the chunk."""
        if not self._wants(job, chunk):
            return False  # nor can later chunks of this round
        try:
            if not job.is_settled and not await self._stage.reuse(job, chunk.num_cached_blocks):
                await self._say_unusable(job)
                return False
        except PoolError as error:
            job.scope.fail(error)
            return False
        if job.progress.num_done != chunk.start:
            raise SessionLostError(
                f"the stage before computes a prompt from token {chunk.start} on, not {job.progress.num_done}"
            )
        return True

    def _wants(self, job: PrefillJob, chunk: ChunkRange) -> bool:
        return not (job.is_dropped or job.result.done() or job.round != chunk.round)

    async def _say_unusable(self, job: PrefillJob) -> None:
        job.end_round(None)
        await self._before.send(Unusable(job.job_id, job.round))
