"""The session of a later rank with its messenger, the first rank and the process group.

Owns: the rank's connections. Does not know: how requests are computed, the Conductor.
"""

import asyncio

from kvstore.client.worker_client import WorkerClient
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.pools import PoolStats
from mooncake.node.process import Progress, Ready, report
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.blocks.sequence_blocks import SequenceBlocks
from workers.groups.meeting import meeting
from workers.groups.next_stage import NextStage
from workers.groups.previous_stage import PreviousStage
from workers.kvcache.copies import copies_for
from workers.kvcache.latest_stats import LatestStats
from workers.kvcache.layerwise import LayerTransfers
from workers.prefill.follower_stage import FollowerStage
from workers.process.block_orders import BlockOrders
from workers.process.rank_runner import RankRunner
from workers.process.stage_session import LINGER_S, STATS_TIMEOUT_S, StageSession


class RankSession(StageSession):
    """A later rank's session, which runs until messenger, leader or group is lost."""

    async def _serve(self, group: asyncio.TaskGroup, pool: WorkerClient, behind: NextStage | None) -> None:
        process, rank = self._process, self._process.rank
        endpoint = rank.endpoints[rank.number - 1]
        identity = peer_identity(self._part, self._incarnation)
        stats = await LatestStats.of(pool)

        async def pools() -> dict[str, PoolStats]:
            return {self._part: await stats.get(STATS_TIMEOUT_S)}

        timeout_s = process.config.conductor.peer_timeout_s
        leader = PreviousStage(
            endpoint,
            identity,
            process.cluster_key,
            self._hello(pool, None, rank.number, rank.size),
            pools,
            timeout_s,
            "the first rank",
        )
        try:
            runner = self._runner(group, pool, leader)
            group.create_task(runner.run())
            group.create_task(leader.beat())
            report(Progress(f"waiting for rank 0 at {endpoint}", 0, 0))
            await leader.join()
            self.is_registered = True
            report(Ready(f"rank {rank.number} on {self._executor.engine}"))
            await leader.run(runner.obey, BlockOrders(pool, None, group).obey, runner.follow)
        finally:
            leader.close(LINGER_S)

    def _runner(self, group: asyncio.TaskGroup, pool: WorkerClient, leader: PreviousStage) -> RankRunner:
        executor, kv = self._executor, self._executor.kv
        overlap = self._process.config.worker.layerwise_overlap
        copies = copies_for(kv, pool.segment)
        transfers = LayerTransfers(copies, overlap=overlap, window=kv.window)
        stage = FollowerStage(executor, pool, transfers, tracer=self._tracer)
        blocks = SequenceBlocks(pool, BlockTransfers(copies_for(kv, pool.segment), kv))
        return RankRunner(
            executor, stage, blocks, leader, group, lambda path: meeting(path, self._process, kv.device)
        )
