"""The runner of a later rank of a tensor-parallel group, which follows the first rank.

A prompt is served as in a stage of a pipeline (`stage_runner`). Prefill passes and iterations come from the
first rank, and are computed in the order in which they come.

Owns: the loop of the rank's passes. Does not know: the queue of prompts, the batch, the Conductor.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from mooncake.errors import MooncakeError, PoolFullError, TransferError
from workers.decode.blocks.sequence_blocks import SequenceBlocks
from workers.engine.batch import Chunk
from workers.engine.tensor_parallel import RankLost
from workers.execution.executor import Executor
from workers.execution.jobs import is_cancelled, wait_to_end
from workers.groups.previous_stage import PreviousStage
from workers.groups.rank_messages import (
    Call,
    CallDone,
    DecodePass,
    FailureKind,
    Meet,
    PrefillPass,
    RankAnswer,
    RankCallFailed,
    RankResult,
    StopCall,
    ToFollower,
)
from workers.groups.stage_messages import Begin, ChunkRange, PromptLeft
from workers.prefill.follower_stage import FollowerStage
from workers.prefill.job import PrefillJob
from workers.prefill.stage_runner import StageRunner

JoinGroup = Callable[[str], AbstractAsyncContextManager[None]]


class RankRunner(StageRunner):
    """A later rank's runner, which carries out and answers the leader's messages.

    `run` closes `stage` and `blocks` in the end.
    """

    def __init__(
        self,
        executor: Executor,
        stage: FollowerStage,
        blocks: SequenceBlocks,
        leader: PreviousStage,
        group: asyncio.TaskGroup,
        join_group: JoinGroup,
    ) -> None:
        super().__init__(stage, leader, group)
        self._executor, self._ranked, self._blocks = executor, stage, blocks
        self._calls = _Calls(blocks, leader.send, group)
        self._join_group = join_group
        self._meeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._passes: asyncio.Queue[PrefillPass | DecodePass] = asyncio.Queue()

    def follow(self, message: ToFollower) -> None:
        """Handle a message that only followers get."""
        match message:
            case Meet(path=path):
                if not self._meeting.done():
                    self._meeting.set_result(path)
            case PrefillPass() | DecodePass():
                self._passes.put_nowait(message)
            case Call():
                self._calls.start(message)
            case StopCall(call_id=call_id):
                self._calls.stop(call_id)

    async def run(self) -> None:
        """Receive passes and compute them with the other ranks until cancelled."""
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
            self._blocks.close()

    async def _serve(self, begin: Begin) -> None:
        try:
            await super()._serve(begin)
        finally:
            await self._before.send(PromptLeft(begin.job_id))

    # -- passes -------------------------------------------------------------------------------------

    async def _prefill(self, announced: PrefillPass) -> None:
        begun = [await self._job_of(chunk) for chunk in announced.ranges]
        # A prompt may have ended during the wait for another one.
        jobs = [
            job if job is not None and self._wants(job, chunk) else None
            for job, chunk in zip(begun, announced.ranges, strict=True)
        ]
        are_computed = await self._ranked.follow(announced, jobs)
        for job, chunk, is_computed in zip(jobs, announced.ranges, are_computed, strict=True):
            if job is not None and job.round == chunk.round and not is_computed and job.lacks_reuse:
                await self._say_unusable(job)

    async def _job_of(self, chunk: ChunkRange) -> PrefillJob | None:
        """Return the job of a chunk; None if this rank cannot compute the chunk."""
        job = self._ranked.jobs.get(chunk.job_id)
        if job is None or job.round != chunk.round or not await self._begins(job, chunk):
            return None
        return job

    def _decode(self, announced: DecodePass) -> None:
        chunks = [Chunk(chunk.token_ids, chunk.start, chunk.pages) for chunk in announced.chunks]
        with self._executor.record.computing(None, expected=RankLost):  # only the leader knows the requests
            self._executor.model.forward(self._executor.prepare(chunks), self._executor.kv)


class _Calls:
    """The leader's calls, each run as a task of `group` and answered."""

    def __init__(
        self,
        blocks: SequenceBlocks,
        answer: Callable[[RankAnswer], Awaitable[None]],
        group: asyncio.TaskGroup,
    ) -> None:
        self._blocks, self._answer, self._group = blocks, answer, group
        self._tasks: dict[int, asyncio.Task[RankResult | None]] = {}

    def start(self, call: Call) -> None:
        """Begin a call. Its answer is sent when its work has ended."""
        self._tasks[call.call_id] = task = asyncio.create_task(self._blocks.perform(call.work))
        self._group.create_task(self._answer_at_end(call.call_id, task))

    def stop(self, call_id: int) -> None:
        """Cancel a call, unless it has been answered."""
        task = self._tasks.get(call_id)
        if task is not None:
            task.cancel()

    async def _answer_at_end(self, call_id: int, task: asyncio.Task[RankResult | None]) -> None:
        answer: RankAnswer
        try:
            answer = CallDone(call_id, await wait_to_end(task, on_cancel=task.cancel))
        except asyncio.CancelledError:
            if not task.cancelled() or is_cancelled():
                raise
            answer = RankCallFailed(call_id, FailureKind.STOPPED, "")
        except PoolFullError as error:
            answer = RankCallFailed(call_id, FailureKind.POOL_FULL, str(error))
        except TransferError as error:
            answer = RankCallFailed(call_id, FailureKind.TRANSFER, str(error))
        except MooncakeError as error:
            answer = RankCallFailed(call_id, FailureKind.POOL, str(error))
        finally:
            del self._tasks[call_id]
        await self._answer(answer)
