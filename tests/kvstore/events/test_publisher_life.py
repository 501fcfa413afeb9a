"""The life of a publisher: its endpoints, its log, and peers without the key."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvstore.events import publisher as event_publisher
from kvstore.events.batches import EventLog
from kvstore.events.vllm import VllmPublisher
from mooncake.errors import ConfigError
from mooncake.messages.kv_events import (
    GetSnapshot,
    ReplayEvents,
)
from mooncake.security.keys import ClusterKey
from tests.kvstore.events.publishers import (
    DECODE,
    DRAM,
    ENCODE,
    KEY,
    KEYS,
    SSD,
    FakePool,
    connected,
    first_message,
    internal,
    running,
    snapshot_of,
    vllm,
)


@pytest.mark.parametrize("taken", ["events", "requests"])
async def test_endpoint_that_cannot_be_had_is_a_config_error_that_names_it(
    tmp_path: Path, taken: str
) -> None:
    pool = FakePool()
    endpoints = {"events": "tcp://127.0.0.1:0", "requests": "tcp://127.0.0.1:0"}
    with contextlib.closing(internal(FakePool(), tmp_path)) as other:
        endpoints[taken] = other.request_endpoint
        with pytest.raises(ConfigError, match=other.request_endpoint):
            VllmPublisher(
                pool.log,
                clock=lambda: 0.0,
                endpoint=endpoints["events"],
                replay_endpoint=endpoints["requests"],
            )


async def test_endpoint_that_makes_no_sense_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        VllmPublisher(EventLog(1), clock=lambda: 0.0, endpoint="nowhere", replay_endpoint="tcp://127.0.0.1:0")


async def test_cancelled_publisher_frees_its_endpoints_even_while_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "ANSWER_QUEUE_LEN", 1)
    pool = FakePool(capacity_batches=10_000)
    pool.store_batches(10_000)
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as dealer:
            await dealer.send(ENCODE(ReplayEvents(0)))
            await dealer.recv()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    successor = None
    while successor is None:  # ZeroMQ gives endpoints back a moment after its sockets are closed
        await asyncio.sleep(0)
        with contextlib.suppress(ConfigError):
            successor = VllmPublisher(
                pool.log,
                clock=lambda: 0.0,
                endpoint=publisher.endpoint,
                replay_endpoint=publisher.request_endpoint,
            )
    successor.close()


async def test_both_publishers_follow_one_log(tmp_path: Path) -> None:
    pool = FakePool()
    ours, theirs = internal(pool, tmp_path), vllm(pool.log, tmp_path)
    async with running(ours, theirs):
        with (
            connected(zmq.SUB, ours.endpoint, key=KEY) as subscriber,
            connected(zmq.SUB, theirs.endpoint) as router,
            connected(zmq.DEALER, ours.request_endpoint, key=KEY) as dealer,
        ):
            await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
            await first_message(router, lambda: pool.flip(SSD, KEYS[0]))
            for number in range(50):
                pool.flip(DRAM, KEYS[number % 5])
                if number % 10 == 0:  # a snapshot seals as well
                    await dealer.send(ENCODE(GetSnapshot()))
                    await snapshot_of(dealer)
            pool.log.seal()
            last_sequence = pool.log.next_sequence - 1
            seen: list[int] = []
            while not seen or seen[-1] < last_sequence:
                seen.append(DECODE((await subscriber.recv_multipart())[1]).sequence)
            seen_by_router: list[int] = []
            while not seen_by_router or seen_by_router[-1] < last_sequence:
                seen_by_router.append(int.from_bytes((await router.recv_multipart())[1], "big"))
            assert seen == list(range(seen[0], last_sequence + 1))
            assert seen_by_router == list(range(seen_by_router[0], last_sequence + 1))


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
@pytest.mark.parametrize("wrong_key", [None, ClusterKey.generate()])
async def test_strangers_hear_no_internal_events_and_are_counted(
    tmp_path: Path, kind: int, wrong_key: ClusterKey | None
) -> None:
    pool = FakePool()
    pool.store_batches(3)
    publisher = internal(pool, tmp_path)
    endpoint = publisher.endpoint if kind == zmq.SUB else publisher.request_endpoint
    async with running(publisher):
        with (
            connected(kind, endpoint, key=wrong_key) as stranger,
            connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber,
            connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer,
        ):
            if kind == zmq.DEALER:
                await stranger.send(ENCODE(GetSnapshot()))
            while publisher.num_refused + publisher.num_unfinished == 0:
                await asyncio.sleep(0.005)
            await first_message(subscriber, lambda: pool.flip(DRAM, KEYS[0]))
            await dealer.send(ENCODE(GetSnapshot()))
            await snapshot_of(dealer)
            assert not await stranger.poll(0)
