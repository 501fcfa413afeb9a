"""The session of an instance's first worker with its messenger and the Conductor.

It lasts as long as messenger and worker are there, and a Conductor: another one may take the place of the
first, and is told of the requests with which this session goes on.

Owns: the worker's connections and the loop that reads orders. Does not know: how requests are computed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import assert_never

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import ConfigError
from mooncake.messages.block_orders import DropCopies, Pin, Replicate, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.bus import Dealer, PeerGoneError, peer_identity
from mooncake.messages.instance_metrics import InstanceReport
from mooncake.messages.migration import HandOver, PreCopy, Prepare, TakeOver
from mooncake.messages.pools import Capacity, PoolShard
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Prefill,
    Prefilled,
    Register,
    Registered,
    RegisterRefused,
    Reserve,
    Retire,
    Retired,
    ReturnNoted,
    SwitchRole,
    ToWorker,
    WorkFailed,
)
from mooncake.node.process import Left, Progress, Ready, report
from mooncake.node.process_config import WorkerProcess
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.prompt_budget import ChunkLimits
from workers.decode.runner import DecodeRunner
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs
from workers.execution.loading import pick_prefill_chunk, pick_saturating_tokens
from workers.groups.followers import Followers, followers_of
from workers.groups.meeting import meeting
from workers.groups.next_stage import NextStage, engines_of, least_capacity, next_stage_of, shards_of
from workers.groups.rank_messages import Meet
from workers.kvcache.copies import copies_for
from workers.kvcache.latest_stats import LatestStats
from workers.prefill.chunks import ChunkPlan, LayerCosts
from workers.prefill.queue import PrefillQueue
from workers.prefill.runner import PrefillRunner
from workers.prefill.stage import stage_of
from workers.process.block_orders import BlockOrders
from workers.process.front_links import FrontLinks
from workers.process.metrics_listener import InstanceStatus
from workers.process.retirement import Retirement, end, is_sending
from workers.process.session_tasks import session_tasks
from workers.process.unheard import UnheardPrompts

HEARTBEATS_PER_TIMEOUT = 5
HEARTBEATS_MISSED = 2.5
"""Silent heartbeats after which a retiring worker waits no longer for the Conductor."""
POLL_S = 0.05
LEAVE_S = 0.5
"""Time that the last messages may take to leave."""
log = logging.getLogger(__name__)


class LeaderSession:
    """A session that runs until messenger, Conductor, a stage or a rank is lost.

    `layout` is the whole model's.
    """

    def __init__(
        self,
        process: WorkerProcess,
        incarnation: int,
        executor: Executor,
        layout: KVLayout,
        fingerprint: str,
        status: InstanceStatus,
        retirement: Retirement,
    ) -> None:
        self._process = process
        self._incarnation = incarnation
        self._executor = executor
        self._layout, self._fingerprint = layout, fingerprint
        self._status, self._retirement = status, retirement
        self._identity = peer_identity(process.instance, incarnation)
        self._heartbeat_s = process.config.conductor.peer_timeout_s / HEARTBEATS_PER_TIMEOUT
        self._fronts = FrontLinks(self._identity, process.cluster_key)
        self.is_registered = False
        self._epoch = 0
        """Epoch of the Conductor with which this session was registered last; 0: with none."""
        self._num_connections = 0
        """Connections to Conductors when the latest one answered the registration."""
        self._unheard = UnheardPrompts()
        self._must_register = asyncio.Event()
        self._heard_at_s = time.monotonic()

    async def run(self) -> None:
        """Serve. Raises `SessionLostError`, or `ConfigError` when the Conductor refuses this worker."""
        pool = await WorkerClient.connect(
            self._process.messenger_socket,
            instance=self._process.part,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            layout=self._layout.of_layers(self._executor.model.layers).of_heads(
                self._executor.model.kv_heads
            ),
        )
        try:
            await self._run_with(pool)
        finally:
            self._status.is_registered = False
            await pool.close()

    async def _run_with(self, pool: WorkerClient) -> None:
        self._stats = await LatestStats.of(pool)
        self._next = next_stage_of(self._process, self._fingerprint)
        self._followers = followers_of(self._process, self._fingerprint)
        self._conductor: Dealer[ToWorker] = Dealer(
            self._process.config.conductor.endpoint, self._identity, ToWorker, self._process.cluster_key
        )
        leaving = asyncio.create_task(self._leave_when_a_rank_is_lost())
        try:
            async with contextlib.AsyncExitStack() as stack, session_tasks(pool) as group:
                if self._next is not None:
                    await self._next.join()
                if self._followers is not None:
                    await self._followers.join()
                self._start_runners(group, pool)
                if self._followers is not None:
                    self._followers.start(group, self._prefill.hear)
                    await stack.enter_async_context(self._meet(self._followers))
                group.create_task(self._beat(pool))
                group.create_task(self._retire())
                group.create_task(self._prefill.run())
                group.create_task(self._decode.run())
                if self._next is not None:
                    group.create_task(self._next.run(self._prefill.hear))
                    group.create_task(self._next.beat())
                await self._obey()
        finally:
            leaving.cancel()
            with contextlib.suppress(PeerGoneError):
                await self._conductor.send(Leave())
            self._conductor.close(linger_s=LEAVE_S)
            self._fronts.close(linger_s=LEAVE_S)
            for link in (self._next, self._followers):
                if link is not None:
                    link.close()

    @contextlib.asynccontextmanager
    async def _meet(self, followers: Followers) -> AsyncIterator[None]:
        """Keep all ranks in one process group while the block runs."""
        path = f"{self._process.rank.meeting}-{self._incarnation}"
        await followers.send(Meet(path))
        async with meeting(path, self._process, self._executor.kv.device):
            yield

    async def _leave_when_a_rank_is_lost(self) -> None:
        """Leave the Conductor as soon as a rank is lost: the session may end late, in a pass that needs the
        rank."""
        if self._followers is not None:
            await self._followers.lost.wait()
            with contextlib.suppress(PeerGoneError):
                await self._conductor.send(Leave())

    def _start_runners(self, group: asyncio.TaskGroup, pool: WorkerClient) -> None:
        config = self._process.config
        prefill_chunk = pick_prefill_chunk(config.worker.prefill_chunk, self._executor.kv.device)
        record = self._executor.record
        self._prefill_jobs, self._decode_jobs = Jobs(group, record), Jobs(group, record)
        self._block_orders = BlockOrders(pool, self._behind, group)
        self._prefill = PrefillRunner(
            stage_of(self._executor, pool, config.worker, self._next, self._followers),
            self._prefill_queue(prefill_chunk),
            self._tell,
            self._prefill_jobs,
        )
        self._decode = DecodeRunner(
            self._executor,
            pool,
            BlockTransfers(copies_for(self._executor.kv, pool.segment), self._executor.kv),
            config.worker.max_batch,
            ChunkLimits(self._executor.kv.page_size, config.worker.mixed_chunk_tokens, prefill_chunk),
            config.messenger.arrival_timeout_s,
            self._tell,
            self._fronts.emit,
            self._decode_jobs,
            self._followers,
        )

    def _prefill_queue(self, chunk: int) -> PrefillQueue:
        """Make the queue. In a pipeline a pass may have as many times more tokens as there are stages.

        Where layers are loaded again, here or in another stage, passes end with whole blocks.
        """
        config, page_size = self._process.config, self._executor.kv.page_size
        pipeline = config.pipeline
        multiple = 1 if config.worker.prefill_layer_window == "all" else page_size
        if self._next is None:
            saturating = pick_saturating_tokens(self._executor.kv.device)
            return PrefillQueue(chunk, saturating_tokens=saturating, multiple=multiple, block_size=page_size)
        if pipeline.chunks == "fixed":
            return PrefillQueue(chunk, multiple=multiple, block_size=page_size)
        max_tokens = pipeline.stages * (chunk - chunk % multiple)
        plan = ChunkPlan(LayerCosts.of(self._executor.model.spec), pipeline.stages, max_tokens, page_size)
        return PrefillQueue(max_tokens, plan, multiple=multiple, block_size=page_size)

    async def _obey(self) -> None:
        """Loop: receive an order and carry it out."""
        while True:
            message = await self._conductor.recv()
            self._heard_at_s = time.monotonic()
            match message:
                case Prefill():
                    self._prefill.start(message)
                case Reserve(ref=ref) | Prepare(ref=ref) if not self._can_decode:
                    reason = "an instance that has not all layers on its device does not decode"
                    await self._tell(WorkFailed(ref, reason, retryable=True))
                case Reserve():
                    self._decode.reserve(message)
                case Decode():
                    self._decode.decode(message)
                case PreCopy() | Prepare() | HandOver() | TakeOver():
                    self._decode.migrate(message)
                case Abort(ref=ref):
                    self._prefill_jobs.cancel(ref)
                    self._decode_jobs.cancel(ref)
                case Pin() | Unpin() | Replicate() | DropCopies():
                    self._block_orders.obey(message)
                case HeartbeatAck(known=known, epoch=epoch):
                    if self.is_registered and epoch != self._epoch:
                        log.warning("there is another conductor: what runs goes on under it")
                        self._register_again()
                    elif self.is_registered and known:
                        self._unheard.answered()
                    elif self.is_registered:
                        raise SessionLostError("the conductor had given this worker up")
                case Registered(epoch=epoch):
                    if not self.is_registered:
                        self.is_registered = self._status.is_registered = True
                        self._epoch, self._num_connections = epoch, self._conductor.num_connections
                        self._report_ready()
                        for prefilled in self._unheard.take_all():
                            await self._tell(prefilled)
                        if self._retirement.wanted.is_set():
                            await self._tell(Retire())
                case SwitchRole(role=role):
                    log.info("the role is %s from now on, and was %s", role.value, self._status.role.value)
                    self._status.role = role
                    self._report_ready()
                case Retired():
                    self._retirement.grant()
                case RegisterRefused(message=reason, retryable=retryable):
                    error = SessionLostError if retryable else ConfigError
                    raise error(f"the conductor refused {self._process.instance}: {reason}")
                case ReturnNoted():
                    pass  # the answer to `Returning`, which has a connection of its own
                case _:
                    assert_never(message)

    def _report_ready(self) -> None:
        report(Ready(f"{self._status.role.value} on {self._engines}"))

    @property
    def _can_decode(self) -> bool:
        """Whether all layers are on this instance's device."""
        return self._next is None and self._executor.kv.window is None

    async def _tell(self, message: FromWorker) -> None:
        """Send to the Conductor; one that does not read is lost."""
        if isinstance(message, Prefilled):
            self._unheard.told(message)
        try:
            await self._conductor.send(message)
        except PeerGoneError as error:
            raise SessionLostError(str(error)) from None

    def _register_again(self) -> None:
        """Let the Conductor know what this session goes on with: it is another one, or refuses that."""
        self.is_registered = self._status.is_registered = False
        self._must_register.set()

    async def _beat(self, pool: WorkerClient) -> None:
        """Register, then send heartbeats; both also test whether the Conductor answers."""
        # Later than the Conductor gives this worker up, should only the connection be broken.
        conductor = self._process.config.conductor
        deadline_s = max(conductor.absence_timeout_s, 2 * conductor.peer_timeout_s)
        while True:
            if self.is_registered and self._conductor.num_connections != self._num_connections:
                self._register_again()
            if self.is_registered:
                heartbeat = await self._heartbeat()
                self._unheard.beat()
                await self._tell(heartbeat)
            else:
                self._must_register.clear()
                await self._tell(self._registration(pool))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._must_register.wait(), self._heartbeat_s)
            if not self.is_registered:
                report(Progress(f"waiting for the conductor at {self._conductor.endpoint}", 0, 0))
            if self._epoch and time.monotonic() - self._heard_at_s > deadline_s:
                raise SessionLostError(f"the conductor has been silent for {deadline_s:g} s")

    async def _retire(self) -> None:
        """Retire when that is wanted: drain until no request is left, or the Conductor is silent."""
        await self._retirement.wanted.wait()
        if self.is_registered:
            await self._tell(Retire())
            report(Progress("draining", 0, 0))
            while not self._retirement.granted.is_set() and self._hears_the_conductor:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._retirement.granted.wait(), self._heartbeat_s)
            await self._wait_until_kvcache_is_sent()
        if self._retirement.is_for_good:
            report(Left())
        end()

    async def _wait_until_kvcache_is_sent(self) -> None:
        while True:
            if not is_sending(await self._stats.get(self._heartbeat_s)):
                return
            await asyncio.sleep(POLL_S)

    @property
    def _hears_the_conductor(self) -> bool:
        return time.monotonic() - self._heard_at_s < HEARTBEATS_MISSED * self._heartbeat_s

    def _registration(self, pool: WorkerClient) -> Register:
        return Register(
            PROTOCOL_VERSION,
            self._process.instance,
            self._incarnation,
            self._status.role,
            self._fingerprint,
            self._layout,
            shards_of(PoolShard(pool.address, pool.segment.layout), self._behind),
            least_capacity(
                Capacity(pool.num_pages, self._executor.kv.num_pages, self._process.config.worker.max_batch),
                self._behind,
            ),
            self._engines,
            self._executor.model.idle_cores,
            self._executor.device_name,
            self._can_decode,
            self._epoch,
            [*self._unheard.held, *self._prefill.held, *self._decode.take_held()] if self._epoch else [],
            max(1, self._conductor.num_connections),
        )

    @property
    def _behind(self) -> NextStage | Followers | None:
        return self._next or self._followers

    @property
    def _engines(self) -> str:
        return engines_of(self._executor.engine, self._behind)

    async def _heartbeat(self) -> Heartbeat:
        pools = {self._process.part: await self._stats.get(self._heartbeat_s)}
        heartbeat = Heartbeat(
            num_running=self._decode.num_running,
            num_waiting=self._prefill.num_waiting + self._decode.num_waiting,
            num_free_device_pages=self._executor.kv.num_free_pages,
            pools=pools | (self._behind.pools if self._behind else {}),
            prefill_s=self._prefill.seconds,
            num_prefill_tokens=dict(self._prefill.num_tokens + self._decode.meter.num_prompt_tokens),
            decode=self._decode.meter.stats,
            decode_load=self._decode.load,
            joining=self._decode.take_joining(),
        )
        self._status.report = InstanceReport(self._process.instance, self._executor.kv.num_pages, heartbeat)
        return heartbeat
