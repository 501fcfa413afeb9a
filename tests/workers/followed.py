"""The other ranks behind a first one, in the same process: real links and runners, no process group."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.client.worker_client import WorkerClient
from mooncake.messages.pools import Capacity, PoolStats
from mooncake.messages.workers import PROTOCOL_VERSION
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.blocks.sequence_blocks import SequenceBlocks
from workers.execution.executor import Executor
from workers.groups.followers import Followers, Hear
from workers.groups.next_stage import NextStage
from workers.groups.previous_stage import PreviousStage
from workers.groups.rank_messages import Meet
from workers.groups.stage_messages import StageHello
from workers.kvcache.copies import LayerCopies, copies_for
from workers.kvcache.layerwise import LayerTransfers
from workers.prefill.follower_stage import FollowerStage
from workers.process.rank_runner import RankRunner

_link_numbers = itertools.count()


@dataclass(slots=True)
class FollowingRank:
    """The parts of one rank. `copies` are those of its prefills."""

    executor: Executor
    pool: WorkerClient
    copies: LayerCopies | None = None
    overlap: bool = True


class FollowedGroup:
    """The other ranks of a group, and the leader's links to them (`followers`). `followed_by` makes it."""

    def __init__(self, folder: Path, fingerprint: str, ranks: Sequence[FollowingRank]) -> None:
        size, self._ranks = len(ranks) + 1, ranks
        self._links = [
            NextStage(
                f"ipc://{folder}/rank-{next(_link_numbers)}",
                CLUSTER_KEY,
                stage=number,
                num_stages=size,
                fingerprint=fingerprint,
                timeout_s=DEADLINE_S,
                kind="rank",
            )
            for number in range(1, size)
        ]
        self.followers = Followers(self._links)
        self._leaders = [self._leader(link, size, fingerprint) for link in self._links]
        self.stages: list[FollowerStage] = []
        self.held: list[SequenceBlocks] = []
        self._tasks: list[asyncio.Task[None]] = []

    def _leader(self, link: NextStage, size: int, fingerprint: str) -> PreviousStage:
        capacity = Capacity(1000, 1000, 8)
        hello = StageHello(PROTOCOL_VERSION, link.stage, size, fingerprint, capacity, "cpu", ())

        async def pools() -> dict[str, PoolStats]:
            return {}

        return PreviousStage(link.endpoint, b"rank#1", CLUSTER_KEY, hello, pools, DEADLINE_S)

    async def start(self, group: asyncio.TaskGroup, hear: Hear) -> None:
        @contextlib.asynccontextmanager
        async def nowhere(_: str) -> AsyncIterator[None]:
            yield

        for leader, rank in zip(self._leaders, self._ranks, strict=True):
            self._tasks.append(group.create_task(leader.beat()))
            kv, segment = rank.executor.kv, rank.pool.segment
            transfers = LayerTransfers(
                rank.copies or copies_for(kv, segment), overlap=rank.overlap, window=kv.window
            )
            stage = FollowerStage(rank.executor, rank.pool, transfers)
            held = SequenceBlocks(rank.pool, BlockTransfers(copies_for(kv, segment), kv))
            runner = RankRunner(rank.executor, stage, held, leader, group, nowhere)
            self.stages.append(stage)
            self.held.append(held)
            for work in (runner.run(), self._join_and_run(leader, runner)):
                self._tasks.append(group.create_task(work))
        await self.followers.join()
        self._tasks += self.followers.start(group, hear)
        await self.followers.send(Meet(""))

    async def _join_and_run(self, leader: PreviousStage, runner: RankRunner) -> None:
        await leader.join()
        await leader.run(runner.obey, lambda _: None, runner.follow)

    def stop(self) -> None:
        """Stop the ranks, within their group of tasks. `close` is to be called after that."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        for leader in self._leaders:
            leader.close(linger_s=0)
        self.followers.close()
