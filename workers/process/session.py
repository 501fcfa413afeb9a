"""The session of an instance's first worker with its messenger and the Conductor.

The session lasts until messenger or worker ends, or no Conductor is left. If another Conductor takes the
place of the first one, the session reports to the new Conductor the requests that the session continues.

Owns: the worker's connections and the loop that reads orders. Does not know: how requests are computed.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, assert_never

import msgspec

from kvstore.client.worker_client import WorkerClient
from messenger.transport.listeners import listen_tcp
from mooncake.config.settings import host_and_port
from mooncake.endpoints import bracketed
from mooncake.errors import ModelError
from mooncake.leadership.leaders import Leaders
from mooncake.messages.block_orders import DropCopies, Pin, Replicate, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import HandOver, ModulesSupport, PlaceModules, PreCopy, Prepare, TakeOver
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.requests import Held
from mooncake.messages.workers import (
    SPOKEN,
    Abort,
    Decode,
    Leave,
    Prefill,
    Register,
    Reserve,
    Role,
    WorkFailed,
)
from mooncake.node.process_config import WorkerProcess
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.runner import DecodeRunner
from workers.decode.tbt_slo.prompt_budget import ChunkLimits
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
from workers.modules.connections import Owners
from workers.modules.helper_link import HelperAccess
from workers.modules.hosting import ModulesHost
from workers.prefill.chunks import ChunkPlan, LayerCosts
from workers.prefill.queue import PrefillQueue
from workers.prefill.runner import PrefillRunner
from workers.prefill.stage import stage_of
from workers.process.block_orders import BlockOrders
from workers.process.conductor_link import ConductorLink, await_leader
from workers.process.metrics_listener import ListenerState
from workers.process.retirement import Retirement
from workers.process.session_tasks import end_beside, session_tasks

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer


class LeaderSession:
    """The session of an instance's first worker.

    A session ends when messenger, Conductor, a later stage or another rank is lost. `layout` is the layout of
    the whole model's blocks, not of the worker's layers or heads.
    """

    def __init__(
        self,
        process: WorkerProcess,
        incarnation: int,
        executor: Executor,
        layout: KVLayout,
        fingerprint: str,
        status: ListenerState,
        retirement: Retirement,
        leaders: Leaders,
        tracer: "Tracer | None",
    ) -> None:
        self._process, self._tracer = process, tracer
        self._incarnation = incarnation
        self._executor = executor
        self._layout, self._fingerprint = layout, fingerprint
        self._status, self._retirement, self._leaders = status, retirement, leaders
        self.is_registered = False
        """Whether the Conductor had registered this session; valid once the session has ended."""

    async def run(self) -> None:
        """Serve requests until the session ends.

        Raises `ConfigError` when the Conductor refuses this worker. Otherwise the session ends with
        `SessionLostError`, or with `PoolError` if the messenger is lost while the session begins.
        """
        try:
            await asyncio.to_thread(self._executor.load_freed_layers)  # freed by the previous session
        except ModelError as error:  # the checkpoint may be readable again later
            raise SessionLostError(str(error)) from None
        await await_leader(self._leaders)
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
            await pool.close()

    async def _run_with(self, pool: WorkerClient) -> None:
        self._next = next_stage_of(self._process, self._fingerprint)
        self._followers = followers_of(self._process, self._fingerprint)
        self._link = ConductorLink(
            self._process,
            self._incarnation,
            self._status,
            self._retirement,
            self._leaders,
            await LatestStats.of(pool),
            lambda: self._engines,
        )
        # The task is not in the group, which may end late: the Conductor is told at once.
        leaving = asyncio.create_task(self._leave_when_a_rank_is_lost(), name="leaving the conductor")
        try:
            async with contextlib.AsyncExitStack() as stack, session_tasks(pool) as group:
                if self._next is not None:
                    await self._next.join()
                if self._followers is not None:
                    await self._followers.join()
                self._modules_listener = self._listen_for_owners(stack)
                self._start_runners(group, pool)
                if self._followers is not None:
                    self._followers.start(group, self._prefill.hear)
                    await stack.enter_async_context(self._meet(self._followers))
                group.create_task(
                    self._link.beat(lambda: self._registration(pool), self._take_held, self._heartbeat)
                )
                group.create_task(self._link.follow())
                group.create_task(self._link.retire())
                group.create_task(self._prefill.run())
                group.create_task(self._decode.run())
                if not self._why_not_helped:
                    group.create_task(self._modules_host.run())
                if self._next is not None:
                    group.create_task(self._next.run(self._prefill.hear))
                    group.create_task(self._next.beat())
                await self._obey()
        finally:
            await end_beside(leaving)
            self.is_registered = self._link.is_registered
            await self._link.close()
            for link in (self._next, self._followers):
                if link is not None:
                    link.close()
            if self._executor.kv.is_helped:
                self._executor.kv.reset()  # nothing of this session uses pages any more

    def _listen_for_owners(self, stack: contextlib.AsyncExitStack) -> socket.socket | None:
        """Return a socket that listens for owners of modules on other hosts until `stack` ends.

        Returns None if this is not configured, or if modules cannot move to this instance. Raises
        ConfigError.
        """
        listen = self._process.config.worker.modules_listen
        if listen is None or self._why_not_helped:
            return None
        return stack.enter_context(listen_tcp(*host_and_port(listen)))

    @contextlib.asynccontextmanager
    async def _meet(self, followers: Followers) -> AsyncIterator[None]:
        """Make a context in which all ranks are in one process group."""
        path = f"{self._process.rank.meeting}-{self._incarnation}"
        await followers.send(Meet(path))
        async with meeting(path, self._process, self._executor.kv.device):
            yield

    async def _leave_when_a_rank_is_lost(self) -> None:
        """Deregister from the Conductor as soon as a rank is lost.

        The session may end later: a pass that waits for the rank must fail first.
        """
        if self._followers is not None:
            await self._followers.lost.wait()
            with contextlib.suppress(SessionLostError):
                await self._link.tell(Leave())

    def _start_runners(self, group: asyncio.TaskGroup, pool: WorkerClient) -> None:
        config = self._process.config
        prefill_chunk = pick_prefill_chunk(config.worker.prefill_chunk, self._executor.kv.device)
        record = self._executor.record
        self._prefill_jobs, self._decode_jobs = Jobs(group, record), Jobs(group, record)
        self._block_orders = BlockOrders(pool, self._behind, group)
        self._prefill = PrefillRunner(
            stage_of(self._executor, pool, config.worker, self._next, self._followers, self._tracer),
            self._prefill_queue(prefill_chunk),
            self._link.tell,
            self._prefill_jobs,
            lambda: self._decode.why_no_prompts,
            lambda: self._decode.helper_lost(),
            lambda: bool(self._decode_jobs.refs),
        )
        self._decode = DecodeRunner(
            self._executor,
            pool,
            BlockTransfers(copies_for(self._executor.kv, pool.segment), self._executor.kv),
            config.worker.max_batch,
            ChunkLimits(self._executor.kv.page_size, config.worker.mixed_chunk_tokens, prefill_chunk),
            config.messenger.arrival_timeout_s,
            self._link.tell,
            self._link.emit,
            self._decode_jobs,
            self._fingerprint,
            HelperAccess(self._process.cluster_key, config.conductor.peer_timeout_s),
            self._link.beat_now,
            self._prefill,
            lambda: self._status.role is Role.PREFILL,
            self._followers,
            self._tracer,
        )

        self._modules_host = ModulesHost(
            self._process.instance,
            self._process.modules_socket,
            self._fingerprint,
            self._executor.model,
            self._executor.kv,
            lambda: max(self._decode.most_pages, self._prefill.most_pages),
            lambda: bool(self._decode.modules.helper),
            None
            if self._modules_listener is None
            else Owners(self._modules_listener, self._process.cluster_key),
        )

    def _prefill_queue(self, chunk: int) -> PrefillQueue:
        """Return the wait queue of prompts, for passes of at most `chunk` tokens.

        In a pipeline of X stages a pass may have X times as many tokens, unless `pipeline.chunks` is `fixed`.
        Passes end with whole blocks if `worker.prefill_layer_window` limits the layers in memory.
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
        """Receive and carry out orders until cancelled."""
        while True:
            message = await self._link.next_order()
            match message:
                case Prefill():
                    self._prefill.start(message)
                case Reserve(ref=ref) | Prepare(ref=ref) if not self._can_decode:
                    reason = "an instance that has not all layers on its device does not decode"
                    await self._link.tell(WorkFailed(ref, reason, retryable=True))
                case Reserve():
                    self._decode.reserve(message)
                case Decode():
                    self._decode.decode(message)
                case PreCopy() | Prepare() | HandOver() | TakeOver():
                    self._decode.migrate(message)
                case PlaceModules():
                    self._decode.place_modules(message)
                case Abort(ref=ref):
                    self._prefill_jobs.cancel(ref)
                    self._decode_jobs.cancel(ref)
                case Pin() | Unpin() | Replicate() | DropCopies():
                    self._block_orders.obey(message)
                case _:
                    assert_never(message)

    @property
    def _can_decode(self) -> bool:
        """Whether all layers are on this instance's device."""
        return self._next is None and self._executor.kv.window is None

    def _registration(self, pool: WorkerClient) -> Register:
        return Register(
            SPOKEN.oldest,
            self._process.instance,
            self._incarnation,
            self._status.role,
            self._fingerprint,
            self._layout,
            shards_of(PoolShard(pool.address, pool.segment.layout), self._behind),
            least_capacity(
                Capacity(
                    pool.num_pages, self._executor.kv.pages.num_own, self._process.config.worker.max_batch
                ),
                self._behind,
            ),
            self._engines,
            self._executor.model.idle_cores,
            self._executor.device_name,
            self._can_decode,
            newest_version=SPOKEN.newest,
            modules=ModulesSupport(
                self._process.modules_socket, self._why_not_helped, self._modules_endpoint
            ),
        )

    @property
    def _modules_endpoint(self) -> str:
        """The endpoint at which owners on other hosts reach this worker as a helper.

        Empty if the worker does not listen for them.
        """
        if self._modules_listener is None:
            return ""
        host = bracketed(self._process.config.messenger.hosts[0])
        return f"tcp://{host}:{self._modules_listener.getsockname()[1]}"

    @property
    def _why_not_helped(self) -> str:
        """The reason why modules can neither leave this instance nor come to it; empty if they can."""
        if self._executor.kv.window is not None:
            return "it has not all layers on its device"
        return self._executor.model.why_not_helped

    def _take_held(self) -> list[Held]:
        """Return the requests that go on under another Conductor, and stop all other requests."""
        return [*self._prefill.held, *self._decode.take_held()]

    @property
    def _behind(self) -> NextStage | Followers | None:
        """The link to the later stages or the other ranks; None if this worker is the whole instance."""
        return self._next or self._followers

    @property
    def _engines(self) -> str:
        return engines_of(self._executor.engine, self._behind)

    async def _heartbeat(self, pools: dict[str, PoolStats]) -> Heartbeat:
        return Heartbeat(
            num_running=self._decode.num_running,
            num_waiting=self._prefill.num_prompts + self._decode.num_waiting,
            num_free_device_pages=self._executor.kv.pages.num_free,
            pools=pools | (self._behind.pools if self._behind else {}),
            prefill_s=self._prefill.seconds,
            num_prefill_tokens=dict(self._prefill.num_tokens + self._decode.meter.num_prompt_tokens),
            decode=self._decode.meter.stats,
            decode_load=self._decode.load,
            joining=self._decode.take_joining(),
            modules=msgspec.structs.replace(
                self._decode.modules, num_device_pages=self._executor.kv.pages.num_usable
            ),
            moves=self._decode.moves,
        )
