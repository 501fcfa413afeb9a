"""The session of an instance whose engine is vLLM, with its messenger and the Conductor.

Owns: the loop that reads orders, heartbeats. Does not know: how vLLM is started and called.
"""

import logging
from typing import TYPE_CHECKING, assert_never

from kvstore.client.worker_client import WorkerClient
from mooncake.leadership.leaders import Leaders
from mooncake.messages.block_orders import DropCopies, Pin, Replicate, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.heartbeats import DecodeLoad, Heartbeat
from mooncake.messages.kv_events import KVStored
from mooncake.messages.migration import HandOver, ModulesSupport, PlaceModules, PreCopy, Prepare, TakeOver
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.requests import Held
from mooncake.messages.workers import SPOKEN, Abort, Decode, Prefill, Register, Reserve, Role, WorkFailed
from mooncake.node.process_config import WorkerProcess
from workers.execution.device_name import CPUINFO, processor_name
from workers.execution.jobs import Jobs
from workers.kvcache.latest_stats import LatestStats
from workers.process.block_orders import BlockOrders
from workers.process.conductor_link import ConductorLink, await_leader
from workers.process.metrics_listener import ListenerState
from workers.process.retirement import Retirement
from workers.process.session_tasks import session_tasks
from workers.vllm.attempts import Attempts
from workers.vllm.cached_blocks import Change
from workers.vllm.command import CHUNK_TOKENS
from workers.vllm.decode import VllmDecode
from workers.vllm.prefill import VllmPrefill
from workers.vllm.server import VllmServer

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

_ENGINE = "vLLM"
log = logging.getLogger(__name__)


class VllmSession:
    """A session with messenger, Conductor and vLLM, which runs until one of them is lost."""

    def __init__(
        self,
        process: WorkerProcess,
        incarnation: int,
        server: VllmServer,
        layout: KVLayout,
        fingerprint: str,
        status: ListenerState,
        retirement: Retirement,
        leaders: Leaders,
        tracer: "Tracer | None",
    ) -> None:
        self._process, self._incarnation, self._server = process, incarnation, server
        self._layout, self._fingerprint = layout, fingerprint
        self._status, self._retirement, self._leaders = status, retirement, leaders
        self._tracer = tracer
        self.is_registered = False
        """Whether the Conductor had registered this session; valid once the session has ended."""

    async def run(self) -> None:
        """Serve orders until the session ends.

        Raises `ConfigError` when the Conductor refuses this worker, and `EngineLostError` when vLLM is lost.
        Otherwise the session ends with `SessionLostError`, or with `PoolError` if the messenger is lost while
        the session begins.
        """
        await await_leader(self._leaders)
        self._pool = await WorkerClient.connect(
            self._process.messenger_socket,
            instance=self._process.instance,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            layout=self._layout,
        )
        try:
            await self._run_with(self._pool)
        finally:
            await self._pool.close()

    async def _run_with(self, pool: WorkerClient) -> None:
        stats, self._load = await LatestStats.of(pool), await self._server.load()
        link = ConductorLink(
            self._process,
            self._incarnation,
            self._status,
            self._retirement,
            self._leaders,
            stats,
            lambda: _ENGINE,
        )
        try:
            async with session_tasks(pool) as group:
                self._jobs = Jobs(group)
                self._block_orders = BlockOrders(pool, None, group)
                attempts = Attempts(self._server, pool, link.tell, self._jobs, self._tracer)
                arrival_timeout_s = self._process.config.messenger.arrival_timeout_s
                self._prefill = VllmPrefill(attempts)
                self._decode = VllmDecode(attempts, arrival_timeout_s, link.emit)
                self._decode.meter.computed(self._load.num_computed_tokens, as_decode=False)
                group.create_task(self._server.ended())
                group.create_task(self._server.kv_events.follow(self._tell_cached))
                group.create_task(link.beat(self._registration, self._take_held, self._heartbeat))
                group.create_task(link.follow())
                group.create_task(link.retire())
                await self._obey(link)
        finally:
            self.is_registered = link.is_registered
            await link.close()

    async def _obey(self, link: ConductorLink) -> None:
        """Receive and carry out orders until cancelled."""
        while True:
            message = await link.next_order()
            match message:
                case Prefill():
                    self._prefill.start(message)
                case Reserve():
                    self._decode.reserve(message)
                case Decode():
                    self._decode.decode(message)
                case Abort(ref=ref):
                    self._jobs.cancel(ref)
                case Pin() | Unpin() | Replicate() | DropCopies():
                    self._block_orders.obey(message)
                case PreCopy(ref=ref) | Prepare(ref=ref) | HandOver(ref=ref) | TakeOver(ref=ref):
                    await link.tell(
                        WorkFailed(ref, "requests of vLLM's instances do not move", retryable=True)
                    )
                case PlaceModules():  # no heartbeat will confirm the order
                    log.warning("modules of vLLM's instances do not move: an order is ignored")
                case _:
                    assert_never(message)

    async def _tell_cached(self, changes: list[Change]) -> None:
        """Report changes of vLLM's own prefix cache to the messenger."""
        for change in changes:
            await self._pool.report_device(change.keys, is_stored=isinstance(change, KVStored))

    def _registration(self) -> Register:
        return Register(
            SPOKEN.oldest,
            self._process.instance,
            self._incarnation,
            self._status.role,
            self._fingerprint,
            self._layout,
            (PoolShard(self._pool.address, self._pool.segment.layout),),
            Capacity(self._pool.num_pages, self._load.num_pages, self._process.config.worker.max_batch),
            _ENGINE,
            device=processor_name(CPUINFO),
            newest_version=SPOKEN.newest,
            least_chunk_tokens=CHUNK_TOKENS,
            can_migrate=False,
            modules=ModulesSupport(why_not=f"{_ENGINE} computes this model"),
        )

    def _take_held(self) -> list[Held]:
        """Stop all requests, and return an empty list: another Conductor places them again."""
        for ref in self._jobs.going_on:
            self._jobs.cancel(ref)
        return []

    async def _heartbeat(self, pools: dict[str, PoolStats]) -> Heartbeat:
        """Return a heartbeat once vLLM gives a sign of life.

        If vLLM gives none, no heartbeat is sent, and the instance counts as lost.
        """
        load = self._load = await self._server.load()
        meter = self._decode.meter
        meter.computed(load.num_computed_tokens, as_decode=self._status.role is not Role.PREFILL)
        return Heartbeat(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_device_pages=round(load.num_pages * (1 - load.kv_usage)),
            pools=pools,
            num_prefill_tokens=dict(self._prefill.num_tokens),
            prefill_s=self._prefill.seconds,
            decode=meter.stats,
            decode_load=DecodeLoad(num_requests=self._decode.num_requests),
        )
