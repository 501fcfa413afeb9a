"""A rank behind the first one of a tensor-parallel group: does as it is told.

A prompt is served as a stage of a pipeline serves one (`stage_runner`); passes come from the first rank, of
prompts and of sequences that are decoded, and are computed in the order in which that computes them.

Owns: the loop of its passes. Does not know: the queue of prompts, the batch, the Conductor.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from workers.decode.held_sequences import HeldSequences
from workers.engine.batch import Chunk
from workers.engine.tensor_parallel import RankLost
from workers.execution.executor import Executor
from workers.groups.previous_stage import PreviousStage
from workers.groups.rank_messages import Call, DecodePass, Meet, PrefillPass, StopCall, ToFollower
from workers.groups.stage_messages import Begin, PassShare, PromptLeft
from workers.prefill.follower_stage import FollowerStage
from workers.prefill.job import PrefillJob
from workers.prefill.stage_runner import StageRunner

JoinGroup = Callable[[str], AbstractAsyncContextManager[None]]


class RankRunner(StageRunner):
    """Takes what the leader says, and answers it. `stage` and `held` end with `run`."""

    def __init__(
        self,
        executor: Executor,
        stage: FollowerStage,
        held: HeldSequences,
        leader: PreviousStage,
        group: asyncio.TaskGroup,
        join_group: JoinGroup,
    ) -> None:
        super().__init__(stage, leader, group)
        self._executor, self._ranked, self._held = executor, stage, held
        self._join_group = join_group
        self._meeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._passes: asyncio.Queue[PrefillPass | DecodePass] = asyncio.Queue()

    def follow(self, message: ToFollower) -> None:
        """What a stage is not told."""
        match message:
            case Meet(path=path):
                if not self._meeting.done():
                    self._meeting.set_result(path)
            case PrefillPass() | DecodePass():
                self._passes.put_nowait(message)
            case Call(call_id=call_id, work=work):
                self._held.start(call_id, work)
            case StopCall(call_id=call_id):
                self._held.stop(call_id)

    async def run(self) -> None:
        """The loop: receive, compute with the others."""
        try:
            async with self._join_group(await self._meeting):
                while True:
                    announced = await self._passes.get()
                    if isinstance(announced, DecodePass):
                        await self._executor.run(lambda: self._decode(announced))  # noqa: B023 - it is awaited
                    else:
                        await self._prefill(announced)
        finally:
            self._ranked.close()
            self._held.close()

    async def _serve(self, begin: Begin) -> None:
        try:
            await super()._serve(begin)
        finally:
            await self._before.send(PromptLeft(begin.job_id))

    # -- passes -------------------------------------------------------------------------------------

    async def _prefill(self, announced: PrefillPass) -> None:
        begun = [await self._job_of(share) for share in announced.shares]
        # One may have gone while another was waited for.
        jobs = [
            job if job is not None and self._wants(job, share) else None
            for job, share in zip(begun, announced.shares, strict=True)
        ]
        are_computed = await self._ranked.follow(announced, jobs)
        for job, share, is_computed in zip(jobs, announced.shares, are_computed, strict=True):
            if job is not None and job.round == share.round and not is_computed and job.lacks_reuse:
                await self._say_unusable(job)

    async def _job_of(self, share: PassShare) -> PrefillJob | None:
        """If this share can be computed here."""
        job = self._ranked.jobs.get(share.job_id)
        if job is None or job.round != share.round or not await self._begins(job, share):
            return None
        return job

    def _decode(self, announced: DecodePass) -> None:
        chunks = [Chunk(chunk.token_ids, chunk.start, chunk.pages) for chunk in announced.chunks]
        with self._executor.record.computing(None, expected=RankLost):  # only the leader knows whose it is
            self._executor.model.forward(self._executor.prepare(chunks), self._executor.kv)
