"""The first rank's links to the other ranks of its tensor-parallel group, its followers.

All messages to the followers leave in one order, whichever task sends them. So followers compute passes in
the order in which this rank's device thread computes them.

Owns: the links to followers, calls and their combined answers. Does not know: prompts, sequences, how ranks
compute.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from mooncake.errors import MooncakeError, PoolError, PoolFullError, TransferError
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.node.process_config import WorkerProcess
from workers.errors import SessionLostError
from workers.execution.jobs import results_of
from workers.groups.next_stage import NextStage
from workers.groups.rank_messages import (
    Call,
    CallDone,
    FailureKind,
    RankAnswer,
    RankCallFailed,
    RankResult,
    RankWork,
    StopCall,
)
from workers.groups.stage_messages import AboutJob, PromptLeft, StageFailed, Unusable, Usable

Hear = Callable[[AboutJob], Awaitable[None]]
_ERRORS: dict[FailureKind, type[MooncakeError]] = {
    FailureKind.POOL_FULL: PoolFullError,
    FailureKind.POOL: PoolError,
    FailureKind.TRANSFER: TransferError,
}


def followers_of(process: WorkerProcess, fingerprint: str) -> "Followers | None":
    """Return a first rank's links to its followers; None if the rank has no group.

    The links listen for the followers.
    """
    rank = process.rank
    if rank.size == 1:
        return None
    links = [
        NextStage(
            endpoint,
            process.cluster_key,
            stage=number,
            num_stages=rank.size,
            fingerprint=fingerprint,
            timeout_s=process.config.conductor.peer_timeout_s,
            kind="rank",
        )
        for number, endpoint in enumerate(rank.endpoints, start=1)
    ]
    return Followers(links)


class Followers:
    """The links to all followers. `join` must return before `start` is called."""

    def __init__(self, links: Sequence[NextStage]) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[msgspec.Struct] = asyncio.Queue()
        self._call_ids = itertools.count(1)
        self._answers: dict[int, list[asyncio.Future[RankResult | None]]] = {}
        """Futures of the followers' answers, by call id. Each list has one future for each follower."""
        self._said: dict[tuple[type, int, int], list[AboutJob]] = {}
        """Reports that some followers have sent, but not all, by the report's type, prompt and round."""
        self.lost = asyncio.Event()
        """Set when a follower is lost, or the session ends."""

    def close(self) -> None:
        """Close the links.

        Followers notice this at their next beats, or when they have heard nothing for `peer_timeout_s`.
        """
        for link in self._links:
            link.close()

    @property
    def capacity(self) -> Capacity:
        """The followers' least capacity, taken for each field separately."""
        return Capacity(
            min(link.capacity.num_pool_pages for link in self._links),
            min(link.capacity.num_device_pages for link in self._links),
            min(link.capacity.max_batch for link in self._links),
        )

    @property
    def shards(self) -> tuple[PoolShard, ...]:
        """The followers' shards of the pool."""
        return tuple(shard for link in self._links for shard in link.shards)

    @property
    def engine(self) -> str:
        """The devices and kernels of the followers as text."""
        return " + ".join(link.engine for link in self._links)

    @property
    def pools(self) -> dict[str, PoolStats]:
        """The latest counters of the followers' pools, by messenger name."""
        return {name: stats for link in self._links for name, stats in link.pools.items()}

    async def join(self) -> None:
        """Wait until all followers have joined.

        A follower of another release, model or group size is refused, and the wait goes on.
        """
        await asyncio.gather(*(link.join() for link in self._links))

    def start(self, group: asyncio.TaskGroup, hear: Hear) -> list[asyncio.Task[None]]:
        """Start the links' tasks in `group`, and return the tasks.

        `hear` gets the followers' reports about prompts. If a follower is lost, a task raises
        `SessionLostError`.
        """
        tasks = [group.create_task(self._post())]
        for rank, link in enumerate(self._links):

            def on_answer(answer: RankAnswer, rank: int = rank) -> None:
                self._take(rank, answer)

            running = link.run(lambda message: self._hear(message, hear), on_answer)
            tasks += [group.create_task(running), group.create_task(link.beat())]
        return tasks

    async def send(self, message: msgspec.Struct) -> None:
        """Queue a message to all followers, behind all earlier messages."""
        self._outbox.put_nowait(message)

    def announce(self, message: msgspec.Struct) -> None:
        """Queue a message to all followers. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    async def call(self, work: RankWork) -> list[RankResult | None]:
        """Have all followers perform `work`, and return their results in the order of ranks.

        Raises a follower's error (PoolFullError, PoolError or TransferError), or SessionLostError if a
        follower is lost. All followers have stopped the work when the call returns or raises, except after a
        loss.
        """
        if self.lost.is_set():
            raise SessionLostError("another rank is gone")
        call_id = next(self._call_ids)
        answers = self._answers[call_id] = [self._loop.create_future() for _ in self._links]
        self._outbox.put_nowait(Call(call_id, work))

        def stop() -> None:
            self._outbox.put_nowait(StopCall(call_id))

        try:
            return await results_of(answers, stop)
        finally:
            del self._answers[call_id]

    # -- messages of the followers ------------------------------------------------------------------

    async def _post(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                for link in self._links:
                    await link.send(message)
        finally:
            self.lost.set()
            for answer in itertools.chain.from_iterable(self._answers.values()):
                if not answer.done():
                    answer.set_exception(SessionLostError("another rank is gone"))

    def _take(self, rank: int, answer: RankAnswer) -> None:
        waiting = self._answers[answer.call_id][rank]
        match answer:
            case CallDone(result=result):
                waiting.set_result(result)
            case RankCallFailed(kind=FailureKind.STOPPED):
                waiting.cancel()
            case RankCallFailed(kind=kind, reason=reason):
                waiting.set_exception(_ERRORS[kind](reason))

    async def _hear(self, message: AboutJob, hear: Hear) -> None:
        """Pass a report on to `hear` when all followers have sent it; `Unusable` and `StageFailed` at once.

        If the followers have sent `Usable`, `hear` gets the report with the fewest blocks.
        """
        if isinstance(message, Unusable | StageFailed):
            await hear(message)
            return
        round_ = message.round if isinstance(message, Usable) else 0
        key = type(message), message.job_id, round_
        said = self._said.setdefault(key, [])
        said.append(message)
        if len(said) < len(self._links):
            return
        del self._said[key]
        if isinstance(message, PromptLeft):
            for key in [key for key in self._said if key[1] == message.job_id]:
                del self._said[key]
        usable = [word for word in said if isinstance(word, Usable)]
        await hear(min(usable, key=lambda word: word.num_blocks) if usable else message)
