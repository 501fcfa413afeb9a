"""A worker's link to the Conductor (registration, heartbeats, orders), and to the fronts that get its tokens.

Another Conductor may take the place of the first one. Then the session reports to the new Conductor the
requests that the session continues.

Owns: the connections, whether the instance is registered, how it retires, what heartbeats say of its pools.
Does not know: how requests are computed, what heartbeats say of the engine.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from mooncake.bus.zeromq import Dealer, PeerGoneError, peer_identity
from mooncake.errors import ConfigError
from mooncake.leadership.conductor_dealer import ConductorDealer
from mooncake.leadership.leaders import Leaders
from mooncake.messages.block_orders import BlockOrder
from mooncake.messages.fronts import ToFront, TokenOutput, Tokens
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.instance_metrics import InstanceReport
from mooncake.messages.migration import MigrationOrder, PlaceModules
from mooncake.messages.pools import PoolStats
from mooncake.messages.requests import Held
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    FromWorker,
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
)
from mooncake.node.process import Draining, Left, Progress, Ready, report, stop
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from workers.errors import SessionLostError
from workers.groups.stage_pulse import beat_interval_s
from workers.kvcache.latest_stats import LatestStats
from workers.process.metrics_listener import ListenerState
from workers.process.retirement import Retirement, is_sending
from workers.process.unheard import UnheardPrompts

SILENCE_SHARE = 0.5
"""The share of `conductor.peer_timeout_s` for which a retiring worker waits for a silent Conductor."""
POLL_S = 0.05
LEAVE_S = 0.5
"""Seconds in which the last messages may leave."""
log = logging.getLogger(__name__)
Order = Reserve | Prefill | Decode | MigrationOrder | PlaceModules | Abort | BlockOrder


async def await_leader(leaders: Leaders) -> None:
    """Wait until it is known which Conductor leads."""
    if leaders.latest is None:
        report(Progress("waiting for a conductor that leads", 0, 0))
        await leaders.known()


class FrontLinks:
    """The links to fronts, by endpoint. A link is opened when its front first gets tokens."""

    def __init__(self, identity: bytes, key: ClusterKey) -> None:
        self._identity, self._key = identity, key
        self._links: dict[str, Dealer[ToFront]] = {}

    async def emit(self, outputs: list[tuple[str, TokenOutput]]) -> None:
        """Send outputs to fronts, in one message to each front.

        Each output comes with the endpoint of its front. Outputs to a front that cannot be reached are
        dropped: the front learns from the Conductor that they were sent.
        """
        by_front: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for endpoint, output in outputs:
            by_front[endpoint].append(output)
        for endpoint, of_front in by_front.items():
            try:
                if endpoint not in self._links:
                    self._links[endpoint] = Dealer(endpoint, self._identity, ToFront, self._key)
                await self._links[endpoint].send(Tokens(of_front))
            except (ConfigError, PeerGoneError) as error:
                log.warning("tokens for the front at %s are lost: %s", endpoint, error)
                if (link := self._links.pop(endpoint, None)) is not None:
                    link.close()

    def close(self, linger_s: float) -> None:
        """Close all links. The last tokens may still leave within `linger_s` seconds."""
        for link in self._links.values():
            link.close(linger_s=linger_s)


class ConductorLink:
    """An instance's link to the Conductor and to fronts, for one session of its first worker."""

    def __init__(
        self,
        process: WorkerProcess,
        incarnation: int,
        status: ListenerState,
        retirement: Retirement,
        leaders: Leaders,
        stats: LatestStats,
        engine: Callable[[], str],
    ) -> None:
        """Connect to the Conductor that leads. `engine` returns the device and kernels as text."""
        self._process, self._stats, self._engine = process, stats, engine
        self._status, self._retirement = status, retirement
        identity = peer_identity(process.instance, incarnation)
        self.heartbeat_s = beat_interval_s(process.config.conductor.peer_timeout_s)
        self._fronts = FrontLinks(identity, process.cluster_key)
        self.emit = self._fronts.emit
        self._conductor: ConductorDealer[ToWorker] = ConductorDealer(
            leaders, identity, ToWorker, process.cluster_key
        )
        self._epoch = 0
        """Epoch of the Conductor at which this session registered last; 0 before the first registration."""
        self._num_connections = 0
        """The number of connections to Conductors when the latest registration was answered.

        If there have been more connections since, the session must register again.
        """
        self._unheard = UnheardPrompts()
        self._wakes_beat = asyncio.Event()
        """An event that makes `beat` go on before the next heartbeat is due."""
        self._send_beat: Callable[[], Awaitable[None]] | None = None
        """Callback that sends a heartbeat; None before the registration."""
        self._beating = asyncio.Lock()
        self._heard_at_s = time.monotonic()

    @property
    def is_registered(self) -> bool:
        return self._status.is_registered

    async def close(self) -> None:
        """Deregister from the Conductor, and close the connections to it and to the fronts."""
        self._status.is_registered = False
        with contextlib.suppress(PeerGoneError):
            await self._conductor.send(Leave())
        self._conductor.close(linger_s=LEAVE_S)
        self._fronts.close(linger_s=LEAVE_S)

    async def next_order(self) -> Order:
        """Return the next order about requests or blocks.

        Orders about the instance itself are carried out here. Raises `SessionLostError` when the Conductor
        has given this worker up or refuses it for now, and `ConfigError` when the Conductor refuses it for
        good.
        """
        while True:
            message = await self._conductor.recv()
            if isinstance(message, Registered | HeartbeatAck) and message.epoch < self._conductor.least_epoch:
                continue  # from a Conductor that does not know yet that another one leads
            self._heard_at_s = time.monotonic()
            match message:
                case HeartbeatAck(known=known, epoch=epoch):
                    if self.is_registered and epoch != self._epoch:
                        log.warning("there is another conductor: what runs goes on under it")
                        self._register_again()
                    elif self.is_registered and known:
                        self._unheard.answered()
                    elif self.is_registered:
                        raise SessionLostError("the conductor had given this worker up")
                case Registered(epoch=epoch, version=version):
                    if not self.is_registered:
                        await self._registered(epoch, version)
                case SwitchRole(role=role):
                    log.info("the role is %s from now on, and was %s", role.value, self._status.role.value)
                    self._status.role = role
                    self._report_ready()
                case Retired(is_for_good=is_for_good):
                    self._retirement.grant(is_for_good=is_for_good)
                case RegisterRefused(message=reason, retryable=retryable):
                    error = SessionLostError if retryable else ConfigError
                    raise error(f"the conductor refused {self._process.instance}: {reason}")
                case ReturnNoted():
                    pass  # the answer to `Returning`, which has a connection of its own
                case _:
                    return message

    async def _registered(self, epoch: int, version: int) -> None:
        if version < PROTOCOL_VERSION:
            log.warning("the conductor speaks protocol %d: so does this instance", version)
        self._status.is_registered = True
        self._epoch, self._num_connections = epoch, self._conductor.num_connections
        self._report_ready()
        self._wakes_beat.set()  # the first heartbeat tells where the instance's modules are
        for prefilled in self._unheard.take_all():
            await self.tell(prefilled)
        if self._retirement.wanted.is_set():
            await self.tell(Retire())

    def _report_ready(self) -> None:
        report(Ready(f"{self._status.role.value} on {self._engine()}"))

    async def tell(self, message: FromWorker) -> None:
        """Send a message to the Conductor. Raises `SessionLostError` if the Conductor takes no messages."""
        if isinstance(message, Prefilled):
            self._unheard.told(message)
        try:
            await self._conductor.send(message)
        except PeerGoneError as error:
            raise SessionLostError(str(error)) from None

    def _register_again(self) -> None:
        """Make `beat` register this session again.

        The registration also lists the requests that this session continues.
        """
        self._status.is_registered = False
        self._wakes_beat.set()

    async def beat(
        self,
        registration: Callable[[], Register],
        take_held: Callable[[], list[Held]],
        heartbeat: Callable[[dict[str, PoolStats]], Awaitable[Heartbeat]],
    ) -> None:
        """Register, then send heartbeats, and check each time whether the Conductor answers.

        Raises `SessionLostError` after a long silence of the Conductor.

        Args:
            registration: Returns the registration of this session.
            take_held: Returns the requests that go on under another Conductor, and stops all other requests.
            heartbeat: Returns a heartbeat. Its argument maps the name of the first worker's messenger to
                the counters of the messenger's pool.
        """
        # If only the connection is broken, the Conductor gives this worker up before this deadline.
        conductor = self._process.config.conductor
        deadline_s = max(conductor.absence_timeout_s, 2 * conductor.peer_timeout_s)

        async def send() -> None:
            beat = await heartbeat({self._process.part: await self._stats.get(self.heartbeat_s)})
            num_pages = beat.modules.num_device_pages
            if num_pages is None:
                num_pages = registration().capacity.num_device_pages
            self._status.report = InstanceReport(self._process.instance, num_pages, beat)
            self._unheard.beat()
            await self.tell(beat)

        self._send_beat = send
        while True:
            self._wakes_beat.clear()
            if self.is_registered and self._conductor.num_connections != self._num_connections:
                self._register_again()
            if self.is_registered:
                await self.beat_now()
            else:
                held = [*self._unheard.held, *take_held()] if self._epoch else []
                await self.tell(self._renewed(registration(), held))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakes_beat.wait(), self.heartbeat_s)
            if not self.is_registered:
                report(Progress(f"waiting for the conductor at {self._conductor.endpoint}", 0, 0))
            if self._epoch and time.monotonic() - self._heard_at_s > deadline_s:
                raise SessionLostError(f"the conductor has been silent for {deadline_s:g} s")

    async def beat_now(self) -> None:
        """Send a heartbeat now, so that the Conductor knows this instance's pages before later messages."""
        if self._send_beat is not None and self.is_registered:
            async with self._beating:
                await self._send_beat()

    def _renewed(self, registration: Register, held: list[Held]) -> Register:
        """Return `registration` with the requests that go on, and with the epoch of the last Conductor."""
        num_connections = max(1, self._conductor.num_connections)
        return msgspec.structs.replace(
            registration, epoch=self._epoch, held=held, num_connections=num_connections
        )

    async def follow(self) -> None:
        """Connect to each Conductor that leads from now on, and register there. Runs until cancelled."""
        while True:
            await self._conductor.follow()
            if self._epoch:
                log.warning("the conductor at %s leads: what runs goes on under it", self._conductor.endpoint)
            self._heard_at_s = time.monotonic()
            self._register_again()

    async def retire(self) -> None:
        """Retire when this is wanted: drain, then end the process.

        The drain ends when no request is left, or when the Conductor is silent.
        """
        await self._retirement.wanted.wait()
        if self.is_registered:
            await self.tell(Retire())
            # An instance without requests ends within a heartbeat, and has nothing to tell.
            draining = Draining("its requests")
            telling = asyncio.get_running_loop().call_later(self.heartbeat_s, report, draining)
            while not self._retirement.granted.is_set() and self._hears_the_conductor:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._retirement.granted.wait(), self.heartbeat_s)
            telling.cancel()
            await self._wait_until_kvcache_is_sent()
        if self._retirement.is_for_good:
            report(Left())
        stop()

    async def _wait_until_kvcache_is_sent(self) -> None:
        while True:
            if not is_sending(await self._stats.get(self.heartbeat_s)):
                return
            await asyncio.sleep(POLL_S)

    @property
    def _hears_the_conductor(self) -> bool:
        most_s = SILENCE_SHARE * self._process.config.conductor.peer_timeout_s
        return time.monotonic() - self._heard_at_s < most_s
