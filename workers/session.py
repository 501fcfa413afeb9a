"""A session: one worker, one messenger, one Conductor, for as long as all three are there.

Owns: the worker's connections and the loop that reads orders. Does not know: how work is done.
"""

import asyncio
import time
from collections import defaultdict

from kvstore.client import PoolClient
from mooncake.blocks import KVLayout
from mooncake.bus import Dealer
from mooncake.config import WorkerProcess
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages import (
    PROTOCOL_VERSION,
    Abort,
    Capacity,
    Decode,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    Prefill,
    Register,
    Registered,
    RegisterRefused,
    Reserve,
    TokenOutput,
    Tokens,
    ToWorker,
)
from mooncake.process import Ready, report
from workers.decode import DecodeRunner
from workers.executor import Executor
from workers.jobs import Jobs
from workers.pool_view import PoolView
from workers.prefill import PrefillRunner

HEARTBEAT_S = 1.0
CONDUCTOR_TIMEOUT_S = 10.0


class SessionLostError(MooncakeError):
    """The messenger or the Conductor is gone, or no longer knows this worker."""


class Session:
    """Runs until messenger or Conductor are lost."""

    def __init__(
        self, process: WorkerProcess, executor: Executor, layout: KVLayout, fingerprint: str, identity: bytes
    ) -> None:
        self._process = process
        self._executor = executor
        self._layout, self._fingerprint = layout, fingerprint
        self._identity = identity
        self._fronts: dict[str, Dealer[ToWorker]] = {}
        self._epoch: int | None = None
        self._heard_at_s = time.monotonic()

    async def run(self) -> None:
        """Serve; raises `SessionLostError`, or `ConfigError` when the Conductor refuses this worker."""
        pool = await PoolClient.connect(
            self._process.messenger_socket,
            instance=self._process.instance,
            incarnation=self._process.incarnation,
            fingerprint=self._fingerprint,
            layout=self._layout,
        )
        conductor: Dealer[ToWorker] = Dealer(
            self._process.config.conductor.endpoint, self._identity, ToWorker
        )
        try:
            async with asyncio.TaskGroup() as group:
                self._start_runners(group, pool, conductor)
                group.create_task(self._watch(pool))
                group.create_task(self._beat(conductor, pool))
                group.create_task(self._decode.run())
                await self._obey(conductor)
        except* SessionLostError as errors:
            raise SessionLostError(str(errors.exceptions[0])) from None
        except* ConfigError as errors:
            raise errors.exceptions[0] from None
        finally:
            conductor.close()
            for front in self._fronts.values():
                front.close()
            await pool.close()

    def _start_runners(
        self, group: asyncio.TaskGroup, pool: PoolClient, conductor: "Dealer[ToWorker]"
    ) -> None:
        worker = self._process.config.worker
        view = PoolView(pool.segment, self._layout)
        self._jobs = Jobs(group)
        self._prefill = PrefillRunner(
            self._executor, pool, view, worker.prefill_chunk, conductor.send, self._jobs
        )
        self._decode = DecodeRunner(
            self._executor,
            pool,
            view,
            worker.max_batch,
            self._process.config.messenger.ack_timeout_s,
            conductor.send,
            self._emit,
            self._jobs,
        )

    async def _obey(self, conductor: "Dealer[ToWorker]") -> None:
        """The loop: receive, act."""
        while True:
            message = await conductor.recv()
            self._heard_at_s = time.monotonic()
            match message:
                case Prefill():
                    self._prefill.start(message)
                case Reserve():
                    self._decode.reserve(message)
                case Decode():
                    self._decode.decode(message)
                case Abort(ref=ref):
                    self._jobs.cancel(ref)
                case HeartbeatAck(known=known):
                    if not known and self._epoch is not None:
                        raise SessionLostError("the conductor has restarted")
                case Registered(epoch=epoch):
                    self._epoch = epoch
                    report(Ready(f"{self._process.role.value} on {self._executor.kv.device}"))
                case RegisterRefused(message=reason):
                    raise ConfigError(f"the conductor refused {self._process.instance}: {reason}")

    async def _beat(self, conductor: "Dealer[ToWorker]", pool: PoolClient) -> None:
        """Register, then heartbeats; both double as the test whether the Conductor answers."""
        while True:
            message: FromWorker = self._registration(pool) if self._epoch is None else self._heartbeat()
            await conductor.send(message)
            await asyncio.sleep(HEARTBEAT_S)
            if self._epoch is not None and time.monotonic() - self._heard_at_s > CONDUCTOR_TIMEOUT_S:
                raise SessionLostError(f"the conductor has been silent for {CONDUCTOR_TIMEOUT_S:g} s")

    def _registration(self, pool: PoolClient) -> Register:
        return Register(
            PROTOCOL_VERSION,
            self._process.instance,
            self._process.incarnation,
            self._process.role,
            self._fingerprint,
            self._layout,
            pool.address,
            Capacity(pool.num_pages, self._executor.kv.num_pages),
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            num_running=self._decode.num_running,
            num_waiting=self._prefill.num_waiting + self._decode.num_waiting,
            num_free_device_pages=self._executor.kv.num_free_pages,
        )

    async def _watch(self, pool: PoolClient) -> None:
        await pool.closed.wait()
        raise SessionLostError("the messenger is gone")

    async def _emit(self, outputs: list[tuple[str, TokenOutput]]) -> None:
        """One message for each front."""
        by_front: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for endpoint, output in outputs:
            by_front[endpoint].append(output)
        for endpoint, of_front in by_front.items():
            if endpoint not in self._fronts:
                self._fronts[endpoint] = Dealer(endpoint, self._identity, ToWorker)
            await self._fronts[endpoint].send(Tokens(of_front))
