"""A worker's link to the Conductor that leads, and to its successor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mooncake.bus.zeromq import Router
from mooncake.config.conductor_section import ConductorConfig
from mooncake.config.settings import Config
from mooncake.leadership.leaders import Leader, Leaders
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.pools import PoolStats
from mooncake.messages.requests import Held, HeldStep, Ref
from mooncake.messages.workers import FromWorker, HeartbeatAck, Leave, Register, Registered, Role
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from tests.conductor.small_cluster import POOL, registration
from tests.deadline import DEADLINE_S
from workers.kvcache.latest_stats import LatestStats
from workers.process.conductor_link import ConductorLink
from workers.process.metrics_listener import ListenerState
from workers.process.retirement import Retirement

KEY = ClusterKey.generate()
HELD = [Held(Ref(5, "r", 1), HeldStep.DECODING)]


class FixedStats(LatestStats):
    """The same counters every time."""

    def __init__(self) -> None:
        """Ask no messenger."""

    async def get(self, timeout_s: float) -> PoolStats:
        return POOL


@asynccontextmanager
async def linked(
    leaders: Leaders, peer_timeout_s: float = 3.0, heartbeat_s: float | None = None
) -> AsyncIterator[ConductorLink]:
    """A link that registers, sends heartbeats, at intervals of its own or of `heartbeat_s`, and follows
    leaders."""
    process = WorkerProcess(
        cluster_key=KEY,
        config=Config(conductor=ConductorConfig(peer_timeout_s=peer_timeout_s)),
        role=Role.DECODE,
        instance="d0",
        incarnation=1,
        messenger_socket="",
        modules_socket="",
        num_local_workers=1,
    )
    status = ListenerState(Role.DECODE)
    link = ConductorLink(process, 1, status, Retirement(), leaders, FixedStats(), lambda: "an engine")
    link.heartbeat_s = heartbeat_s or link.heartbeat_s

    async def heartbeat(pools: dict[str, PoolStats]) -> Heartbeat:
        return Heartbeat(0, 0, 8, pools)

    register = registration("d0", Role.DECODE)
    beating = asyncio.create_task(link.beat(lambda: register, lambda: HELD, heartbeat))
    following, hearing = asyncio.create_task(link.follow()), asyncio.create_task(link.next_order())
    try:
        yield link
    finally:
        for task in (beating, following, hearing):
            task.cancel()
        await asyncio.wait((beating, following, hearing))
        await link.close()


async def next_registration(router: Router[FromWorker]) -> tuple[bytes, Register]:
    while True:
        sender, message = await router.recv()
        if isinstance(message, Register):
            return sender, message


async def test_a_new_leader_is_told_at_once_what_goes_on() -> None:
    first: Router[FromWorker] = Router("tcp://127.0.0.1:*", FromWorker, KEY)
    second: Router[FromWorker] = Router("tcp://127.0.0.1:*", FromWorker, KEY)
    leaders = Leaders(Leader(first.endpoint, 5))
    # No heartbeat is due in the time of the test.
    async with asyncio.timeout(DEADLINE_S), linked(leaders, heartbeat_s=10 * DEADLINE_S) as link:
        sender, register = await next_registration(first)
        assert (register.epoch, register.held) == (0, [])
        await first.send(sender, Registered(5))
        while not link.is_registered:
            await asyncio.sleep(0.01)
        leaders.tell(Leader(second.endpoint, 9))
        sender, register = await next_registration(second)
        assert (register.epoch, register.held, register.num_connections) == (5, HELD, 1)
        await second.send(sender, Registered(9))
        while not link.is_registered:
            await asyncio.sleep(0.01)
    first.close()
    second.close()


async def test_a_conductor_that_does_not_lead_any_more_is_not_obeyed() -> None:
    router: Router[FromWorker] = Router("tcp://127.0.0.1:*", FromWorker, KEY)
    async with asyncio.timeout(DEADLINE_S), linked(Leaders(Leader(router.endpoint, 9))) as link:
        for epoch in (8, 9):
            sender, _ = await next_registration(router)
            assert not link.is_registered
            await router.send(sender, Registered(epoch))
        while not link.is_registered:
            await asyncio.sleep(0.01)
        await router.send(sender, HeartbeatAck(known=False, epoch=8))
        for _ in range(2):
            assert isinstance((await router.recv())[1], Heartbeat)
        assert link.is_registered
    router.close()


async def test_a_heartbeat_out_of_turn_is_sent_before_what_follows_it() -> None:
    router: Router[FromWorker] = Router("tcp://127.0.0.1:*", FromWorker, KEY)
    # No further heartbeat is due in the time of the test.
    async with (
        asyncio.timeout(DEADLINE_S),
        linked(Leaders(Leader(router.endpoint, 9)), heartbeat_s=10 * DEADLINE_S) as link,
    ):
        await link.beat_now()  # not registered: there is nobody to tell
        sender, _ = await next_registration(router)
        await router.send(sender, Registered(9))
        assert isinstance((await router.recv())[1], Heartbeat), "the first one comes at once"
        await link.beat_now()
        await link.tell(Leave())
        assert [type((await router.recv())[1]) for _ in range(2)] == [Heartbeat, Leave]
    router.close()


async def test_heartbeats_come_once_a_second_however_long_the_peer_timeout() -> None:
    router: Router[FromWorker] = Router("tcp://127.0.0.1:*", FromWorker, KEY)
    leaders = Leaders(Leader(router.endpoint, 9))
    async with asyncio.timeout(DEADLINE_S), linked(leaders, 10 * DEADLINE_S) as link:
        sender, _ = await next_registration(router)
        await next_registration(router)  # again, as nobody has answered
        await router.send(sender, Registered(9))
        for _ in range(2):
            assert isinstance((await router.recv())[1], Heartbeat)
        assert link.heartbeat_s == 1.0
    router.close()
