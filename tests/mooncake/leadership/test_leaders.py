"""News of leaders: nobody misses one, nobody is told twice."""

import asyncio

import pytest

from mooncake.bus.zeromq import Router
from mooncake.config.cluster_section import ClusterConfig
from mooncake.config.conductor_section import ConductorConfig
from mooncake.leadership.conductor_dealer import ConductorDealer
from mooncake.leadership.leaders import Leader, Leaders, Reach, following
from mooncake.messages.fronts import Cancel, FromFront, Unknown
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S

A, B = Leader("tcp://10.0.0.1:7800", 3), Leader("tcp://10.0.0.2:7800", 9)
KEY = ClusterKey.generate()


async def test_the_next_leader_is_awaited_and_the_same_one_is_no_news() -> None:
    leaders = Leaders()
    known, after = (asyncio.create_task(one) for one in (leaders.known(), leaders.after(A)))
    await asyncio.sleep(0)
    leaders.tell(A)
    async with asyncio.timeout(DEADLINE_S):
        assert await known == A
        leaders.tell(A)
        await asyncio.sleep(0)
        assert not after.done()
        leaders.tell(B)
        assert await after == B
        assert await leaders.after(A) == B, "it has changed before somebody asks"


def test_each_change_of_reach_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reach = Reach()
    for _ in range(2):
        for _ in range(3):
            reach.succeeded()
        assert reach.is_given
        for _ in range(3):
            reach.failed(ValueError("refused"))
        assert not reach.is_given
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "etcd does not answer",
        "etcd answers again",
        "etcd does not answer",
    ]


async def test_without_etcd_the_configured_conductor_leads() -> None:
    async with following(ClusterConfig(), ConductorConfig(endpoint="ipc:///conductor")) as leaders:
        assert await leaders.known() == Leader("ipc:///conductor")


async def test_what_a_former_leader_has_said_is_not_heard() -> None:
    routers: list[Router[FromFront]] = [Router("tcp://127.0.0.1:*", FromFront, KEY) for _ in range(2)]
    leaders = Leaders()
    dealer: ConductorDealer[Unknown] = ConductorDealer(leaders, b"front#1", Unknown, KEY)
    assert dealer.least_epoch == 0
    async with asyncio.timeout(DEADLINE_S):
        for epoch, router in enumerate(routers, start=5):
            leaders.tell(Leader(router.endpoint, epoch))
            await dealer.follow()
            assert dealer.least_epoch == epoch
            await dealer.send(Cancel(router.endpoint))
            sender, message = await router.recv()
            assert message == Cancel(router.endpoint)
            assert dealer.num_connections == 1
            for _ in range(2):
                await router.send(sender, Unknown([router.endpoint]))
            # With the first one the second one is there, or on its way.
            assert await dealer.recv() == Unknown([router.endpoint])
    dealer.close()
    for router in routers:
        router.close()
