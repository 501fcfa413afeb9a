"""The link between two stages of a pipeline: who joins, who is refused, who is gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from mooncake.bus.zeromq import peer_identity
from mooncake.errors import ConfigError
from mooncake.messages.block_orders import Pin
from mooncake.messages.pools import Capacity, PoolStats
from mooncake.messages.workers import PROTOCOL_VERSION
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from tests.mooncake.messages.test_instance_metrics import STATS
from tests.relay import relay_to
from workers.errors import SessionLostError
from workers.groups.next_stage import NextStage
from workers.groups.previous_stage import PreviousStage
from workers.groups.stage_messages import AboutJob, ChunkRange, End, StageAlive, StageHello, Stored
from workers.groups.stage_pulse import LinkPulse

TIMEOUT_S = 0.5
SMALL = Capacity(1, 1, 1)
HELLO = StageHello(PROTOCOL_VERSION, 1, 3, "f" * 32, Capacity(10, 20, 8), "cpu", ())


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/stage"


def next_stage(endpoint: str) -> NextStage:
    return NextStage(endpoint, CLUSTER_KEY, stage=1, num_stages=3, fingerprint="f" * 32, timeout_s=TIMEOUT_S)


def previous_stage(endpoint: str, incarnation: int = 1, hello: StageHello = HELLO) -> PreviousStage:
    identity = peer_identity("p.1", incarnation)
    return PreviousStage(endpoint, identity, CLUSTER_KEY, hello, pools, TIMEOUT_S)


async def pools() -> dict[str, PoolStats]:
    return {"p.1": STATS}


@contextlib.asynccontextmanager
async def joined(endpoint: str) -> AsyncIterator[tuple[NextStage, PreviousStage]]:
    """Both ends. The stage behind says nothing more by itself."""
    behind, before = next_stage(endpoint), previous_stage(endpoint)
    beating = asyncio.create_task(before.beat())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(behind.join(), before.join())
        beating.cancel()
        yield behind, before
    finally:
        beating.cancel()
        before.close(0)
        behind.close()


async def ignore(message: AboutJob) -> None:
    pass


async def test_stage_that_comes_first_waits_for_the_one_before(endpoint: str) -> None:
    before = previous_stage(endpoint)
    beating = asyncio.create_task(before.beat())
    await asyncio.sleep(0)
    behind = next_stage(endpoint)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(behind.join(), before.join())
    assert behind.capacity == HELLO.capacity
    beating.cancel()
    before.close(0)
    behind.close()


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (StageHello(0, 1, 3, "f" * 32, SMALL, "cpu", ()), "protocol version differs"),
        (
            StageHello(PROTOCOL_VERSION, 2, 3, "f" * 32, SMALL, "cpu", ()),
            "stage differs: ours is 1",
        ),
        (
            StageHello(PROTOCOL_VERSION, 1, 2, "f" * 32, SMALL, "cpu", ()),
            "number of stages differs",
        ),
        (
            StageHello(PROTOCOL_VERSION, 1, 3, "0" * 32, SMALL, "cpu", ()),
            "model fingerprint differs",
        ),
    ],
)
async def test_stage_that_does_not_fit_is_told_why_and_another_may_come(
    endpoint: str, hello: StageHello, message: str
) -> None:
    behind = next_stage(endpoint)
    joining = asyncio.create_task(behind.join())
    for stage_hello, fits in ((hello, False), (HELLO, True)):
        before = previous_stage(endpoint, incarnation=1 + fits, hello=stage_hello)
        beating = asyncio.create_task(before.beat())
        async with asyncio.timeout(DEADLINE_S):
            if fits:
                await asyncio.gather(before.join(), joining)
            else:
                with pytest.raises(ConfigError, match=message):
                    await before.join()
        beating.cancel()
        before.close(0)
    behind.close()


async def test_silence_ends_both_ends(endpoint: str) -> None:
    async with joined(endpoint) as (behind, before):
        with pytest.raises(SessionLostError, match=r"stage 1 has been silent for 0\.5 s"):
            await behind.beat()
        behind.close()
        with pytest.raises(SessionLostError, match=r"the stage before has been silent for 0\.5 s"):
            await before.beat()


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(0.5, 0.1), (5.0, 1.0), (60.0, 1.0)])
async def test_beats_come_once_a_second_however_long_the_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, interval_s: float
) -> None:
    intervals: list[float] = []

    async def send() -> None:
        pass

    async def sleep(seconds: float) -> None:
        intervals.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(SessionLostError, match=f"stage 1 has been silent for {timeout_s:g} s"):
        await LinkPulse("stage 1", timeout_s).beat(send)
    assert set(intervals) == {interval_s}
    assert len(intervals) == round(timeout_s / interval_s) + 1


async def test_stage_that_is_gone_is_noticed_before_it_has_been_silent_for_long(endpoint: str) -> None:
    async with joined(endpoint) as (behind, before):
        before.close(0)
        with pytest.raises(SessionLostError, match="stage 1 is gone"):
            await behind.beat()


async def test_new_life_of_the_stage_behind_ends_the_session(endpoint: str) -> None:
    async with joined(endpoint) as (behind, _):
        again = previous_stage(endpoint, incarnation=2)
        beating = asyncio.create_task(again.beat())
        with pytest.raises(SessionLostError, match="stage 1 has begun anew"):
            await behind.run(ignore)
        beating.cancel()
        again.close(0)


async def test_stage_that_does_not_fit_does_not_disturb_one_that_does(endpoint: str) -> None:
    """A process that was started by mistake, or one of the next release, comes to a group at work."""
    other = StageHello(PROTOCOL_VERSION, 1, 3, "0" * 32, SMALL, "cpu", ())
    async with joined(endpoint) as (behind, before), asyncio.timeout(DEADLINE_S):
        heard = asyncio.Event()

        async def hear(message: AboutJob) -> None:
            heard.set()

        running = asyncio.create_task(behind.run(hear))
        stranger = previous_stage(endpoint, incarnation=2, hello=other)
        beating = asyncio.create_task(stranger.beat())
        with pytest.raises(ConfigError, match="model fingerprint differs"):
            await stranger.join()
        await before.send(Stored(1))
        await heard.wait()
        beating.cancel()
        stranger.close(0)
        running.cancel()


async def test_new_life_of_the_stage_before_ends_the_session(endpoint: str) -> None:
    async with joined(endpoint) as (behind, before):
        behind.close()
        anew = next_stage(endpoint)
        joining = asyncio.create_task(anew.join())
        beating = asyncio.create_task(before.beat())
        with pytest.raises(SessionLostError, match="the stage before has begun anew"):
            await before.run(lambda message: None, lambda order: None)
        joining.cancel()
        beating.cancel()
        anew.close()


async def test_connection_that_broke_and_is_there_again_ends_the_session() -> None:
    """Passes may have been lost with it, and the words that there is room for more."""
    behind = next_stage("tcp://127.0.0.1:*")
    with relay_to(int(behind.endpoint.rpartition(":")[2])) as relay:
        before = previous_stage(f"tcp://127.0.0.1:{relay.port}")
        beating = asyncio.create_task(before.beat())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(behind.join(), before.join())
            beating.cancel()
            relay.break_connections()
            speaking = asyncio.create_task(say_that_it_is_alive(behind))
            with pytest.raises(SessionLostError, match="the connection to the stage before broke"):
                await before.run(lambda message: None, lambda order: None)
        speaking.cancel()
        before.close(0)
    behind.close()


async def say_that_it_is_alive(behind: NextStage) -> None:
    while True:
        with contextlib.suppress(SessionLostError):  # it is not there again yet
            await behind.send(StageAlive(known=True))
        await asyncio.sleep(0.01)


async def test_connection_to_an_earlier_life_of_the_stage_before_is_nothing_lost(endpoint: str) -> None:
    """Else each end of a session would be that of the next one."""
    earlier, before = next_stage(endpoint), previous_stage(endpoint)
    beating = asyncio.create_task(before.beat())
    async with asyncio.timeout(DEADLINE_S):
        while not before._dealer.num_connections:
            await asyncio.sleep(0.01)
        earlier.close()
        behind = next_stage(endpoint)
        await asyncio.gather(behind.join(), before.join())
        assert before._dealer.num_connections == 2
        obeyed = asyncio.Event()
        running = asyncio.create_task(before.run(lambda message: obeyed.set(), lambda order: None))
        await behind.send(StageAlive(known=True))
        await behind.send(End(1))
        await obeyed.wait()
    for task in (beating, running):
        task.cancel()
    before.close(0)
    behind.close()


async def test_passes_come_whole_and_in_order_and_only_a_few_ahead(endpoint: str) -> None:
    """Each has more bytes than a message may have."""
    states = [torch.full((1200, 1024), float(number)) for number in range(4)]
    async with joined(endpoint) as (behind, before), asyncio.TaskGroup() as group:
        heard: list[AboutJob] = []
        obeyed: list[object] = []
        pinned: list[object] = []

        async def hear(message: AboutJob) -> None:
            heard.append(message)

        running = [
            group.create_task(work)
            for work in (
                behind.run(hear),
                behind.beat(),
                before.run(obeyed.append, pinned.append),
                before.beat(),
            )
        ]
        handed: list[int] = []

        async def hand_on() -> None:
            for number, hidden in enumerate(states):
                await behind.compute([ChunkRange(number, 0, 0, 0, 1200)], hidden)
                handed.append(number)
            await behind.send(Pin([b"k"], 1.0))
            await behind.send(End(3))

        handing = group.create_task(hand_on())
        async with asyncio.timeout(DEADLINE_S):
            for number, hidden in enumerate(states):
                incoming = await before.passes.get()
                assert [chunk.job_id for chunk in incoming.ranges] == [number]
                assert torch.equal(
                    torch.frombuffer(incoming.hidden, dtype=torch.float32).view(1200, 1024), hidden
                )
                assert len(handed) <= number + 1
                await before.taken()
            await handing
            await before.send(Stored(3))
            while not (heard and obeyed and behind.pools):
                await asyncio.sleep(0.001)
        assert behind.pools == {"p.1": STATS}
        assert (heard, obeyed, pinned) == ([Stored(3)], [End(3)], [Pin([b"k"], 1.0)])
        for task in running:
            task.cancel()
