"""The session of a stage, other than the first, with its messenger, the previous stage and the next one.

Owns: the stage's connections. Does not know: how requests are computed, the Conductor.
"""

import asyncio
from typing import TYPE_CHECKING

from kvstore.client.worker_client import WorkerClient
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.workers import PROTOCOL_VERSION
from mooncake.node.process import Progress, Ready, report
from mooncake.node.process_config import WorkerProcess
from workers.execution.executor import Executor
from workers.groups.next_stage import NextStage, engines_of, least_capacity, next_stage_of, shards_of
from workers.groups.previous_stage import PreviousStage
from workers.groups.stage_messages import StageHello
from workers.kvcache.latest_stats import LatestStats
from workers.prefill.stage import stage_of
from workers.prefill.stage_runner import StageRunner
from workers.process.block_orders import BlockOrders
from workers.process.session_tasks import session_tasks

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

STATS_TIMEOUT_S = 0.5
"""Seconds for which a beat waits for the pool's newest counters."""
LINGER_S = 0.5
"""Seconds in which the last messages may leave."""


class StageSession:
    """The session of a stage of a prefill pipeline other than the first one.

    A session lasts from its connection to the messenger until the messenger, the previous stage or the next
    stage is lost. `layout` is the layout of the whole model's blocks, not of the stage's layers.
    """

    def __init__(
        self,
        process: WorkerProcess,
        incarnation: int,
        executor: Executor,
        layout: KVLayout,
        fingerprint: str,
        tracer: "Tracer | None",
    ) -> None:
        self._process, self._stage, self._tracer = process, process.stage, tracer
        self._part = process.part
        self._incarnation = incarnation
        self._executor = executor
        self._layout, self._fingerprint = layout, fingerprint
        self.is_registered = False

    async def run(self) -> None:
        """Serve prompts until the session ends.

        Raises `ConfigError` when the previous stage refuses this stage. Otherwise the session ends with
        `SessionLostError`, or with `PoolError` if the messenger is lost while the session begins.
        """
        pool = await WorkerClient.connect(
            self._process.messenger_socket,
            instance=self._part,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            layout=self._layout.of_layers(self._executor.model.layers).of_heads(
                self._executor.model.kv_heads
            ),
        )
        behind = next_stage_of(self._process, self._fingerprint)
        try:
            async with session_tasks(pool) as group:
                if behind is not None:
                    await behind.join()
                await self._serve(group, pool, behind)
        finally:
            if behind is not None:
                behind.close()
            await pool.close()

    async def _serve(self, group: asyncio.TaskGroup, pool: WorkerClient, behind: NextStage | None) -> None:
        endpoint = self._stage.endpoints[self._stage.number - 1]
        identity = peer_identity(self._part, self._incarnation)
        timeout_s = self._process.config.conductor.peer_timeout_s
        stats = await LatestStats.of(pool)

        async def pools() -> dict[str, PoolStats]:
            own = {self._part: await stats.get(STATS_TIMEOUT_S)}
            return own | (behind.pools if behind else {})

        hello = self._hello(pool, behind, self._stage.number, self._stage.num_stages)
        before = PreviousStage(endpoint, identity, self._process.cluster_key, hello, pools, timeout_s)
        try:
            config = self._process.config.worker
            stage = stage_of(self._executor, pool, config, behind, tracer=self._tracer)
            runner = StageRunner(stage, before, group)
            group.create_task(runner.run())
            group.create_task(before.beat())
            if behind is not None:
                group.create_task(behind.run(runner.hear))
                group.create_task(behind.beat())
            report(Progress(f"waiting for stage {self._stage.number - 1} at {endpoint}", 0, 0))
            await before.join()
            self.is_registered = True
            report(Ready(f"stage {self._stage.number} on {self._executor.engine}"))
            await before.run(runner.obey, BlockOrders(pool, behind, group).obey)
        finally:
            before.close(LINGER_S)

    def _hello(self, pool: WorkerClient, behind: NextStage | None, number: int, size: int) -> StageHello:
        """Return the greeting of the worker with this number in a pipeline or group of `size` workers."""
        return StageHello(
            PROTOCOL_VERSION,
            number,
            size,
            self._fingerprint,
            least_capacity(
                Capacity(
                    pool.num_pages, self._executor.kv.pages.num_pages, self._process.config.worker.max_batch
                ),
                behind,
            ),
            engines_of(self._executor.engine, behind),
            shards_of(PoolShard(pool.address, pool.segment.layout), behind),
        )
