"""Internal KV events, replays and snapshots, over real sockets on the loopback."""

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvstore.events import internal as internal_events
from kvstore.events.internal import InternalPublisher
from mooncake.messages.kv_events import (
    EventsGone,
    GetSnapshot,
    KVCleared,
    KVEvents,
    KVRemoved,
    KVSnapshot,
    KVStored,
    ReplayDone,
    ReplayEvents,
)
from mooncake.messages.pools import Tier
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
    replayed,
    running,
    snapshot_of,
    with_large_snapshot,
)


async def test_live_events_arrive_in_order(tmp_path: Path) -> None:
    pool = FakePool()
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber:
            topic, payload = await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
            assert topic == b"kv"
            sequence = DECODE(payload).sequence
            received: list[bytes] = []
            for key in KEYS:
                pool.flip(DRAM, key)
                await asyncio.sleep(0)
            while len(received) < len(KEYS):
                batch = DECODE((await subscriber.recv_multipart())[1])
                sequence += 1
                assert (batch.instance, batch.incarnation, batch.sequence) == ("p0", 7, sequence)
                for event in batch.events:
                    if event.tier is DRAM:
                        assert isinstance(event, KVStored)
                        received += event.keys
            assert received == KEYS


async def test_late_subscriber_gets_what_it_missed_by_replay(tmp_path: Path) -> None:
    pool = FakePool()
    pool.log.seal()
    pool.store_batches(3)
    pool.flip(SSD, KEYS[9])  # not sealed yet
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer:
            await dealer.send(ENCODE(ReplayEvents(0)))
            batches, end = await replayed(dealer)
            assert [batch.sequence for batch in batches] == [0, 1, 2, 3, 4]
            assert batches[0].events == [KVCleared()]
            assert batches[2] == KVEvents("p0", 7, 2, [KVStored(DRAM, [KEYS[1]])])
            assert batches[4].events == [KVStored(SSD, [KEYS[9]])]
            assert end == ReplayDone("p0", 7, next_sequence=5)

            await dealer.send(ENCODE(ReplayEvents(4)))
            assert (await replayed(dealer))[0] == batches[4:]
            await dealer.send(ENCODE(ReplayEvents(5)))
            assert await replayed(dealer) == ([], ReplayDone("p0", 7, next_sequence=5))


async def test_replay_has_what_has_not_been_published_yet(tmp_path: Path) -> None:
    pool = FakePool()
    pool.log.seal()
    publisher = internal(pool, tmp_path, flush_interval_s=3600.0)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer:
            for number, key in enumerate(KEYS[:3], start=1):
                pool.flip(DRAM, key)
                await dealer.send(ENCODE(ReplayEvents(number)))
                assert (await replayed(dealer))[0] == [
                    KVEvents("p0", 7, number, [KVStored(DRAM, [key])]),
                ]


@pytest.mark.parametrize("from_sequence", [0, 6, 12, 10**18])
async def test_replay_of_batches_that_the_log_does_not_have_is_refused(
    tmp_path: Path, from_sequence: int
) -> None:
    pool = FakePool(capacity_batches=4)
    pool.store_batches(11)
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer:
            await dealer.send(ENCODE(ReplayEvents(from_sequence)))
            gone = EventsGone("p0", 7, oldest_sequence=7, next_sequence=11)
            assert await replayed(dealer) == ([], gone)


async def test_snapshot_comes_in_parts_and_says_after_which_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_events, "SNAPSHOT_PART_KEYS", 3)
    pool = FakePool()
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer:
            await dealer.send(ENCODE(GetSnapshot()))
            empty = await snapshot_of(dealer)
            assert empty == [KVSnapshot("p0", 7, 0, DRAM, [], is_last=True)]
            for key in KEYS[:4]:
                pool.flip(DRAM, key)
            for key in KEYS[:3]:
                pool.flip(SSD, key)
            await dealer.send(ENCODE(GetSnapshot()))
            parts = await snapshot_of(dealer)
            assert [(part.sequence, part.tier, len(part.keys)) for part in parts] == [
                (1, DRAM, 3),
                (1, DRAM, 1),
                (1, SSD, 3),
            ]
            assert {(part.tier, key) for part in parts for key in part.keys} == pool.held


class Mirror:
    """A subscriber as the Conductor will be one, on a network that loses many a live batch."""

    def __init__(self, publisher: InternalPublisher, loss: random.Random) -> None:
        self._publisher, self._loss = publisher, loss
        self.held: set[tuple[Tier, bytes]] = set()
        self.next_sequence = 0
        self.num_replays = self.num_snapshots = 0

    async def follow(self, until: Callable[[], bool]) -> None:
        with (
            connected(zmq.SUB, self._publisher.endpoint, key=KEY) as subscriber,
            connected(zmq.DEALER, self._publisher.request_endpoint, key=KEY) as dealer,
        ):
            await self._start_anew(dealer)
            while not until():
                if not await subscriber.poll(5):
                    await self._catch_up(dealer)  # the last batch may be the one that was lost
                    continue
                batch = DECODE((await subscriber.recv_multipart())[1])
                if self._loss.random() < 0.3:
                    continue
                if batch.sequence > self.next_sequence:
                    await self._catch_up(dealer)
                self._apply(batch)

    async def _catch_up(self, dealer: zmq.asyncio.Socket) -> None:
        self.num_replays += 1
        await dealer.send(ENCODE(ReplayEvents(self.next_sequence)))
        batches, end = await replayed(dealer)
        for batch in batches:
            self._apply(batch)
        if isinstance(end, EventsGone):
            await self._start_anew(dealer)
        else:
            assert self.next_sequence == end.next_sequence

    async def _start_anew(self, dealer: zmq.asyncio.Socket) -> None:
        await dealer.send(ENCODE(GetSnapshot()))
        parts = await snapshot_of(dealer)
        assert len({part.sequence for part in parts}) == 1
        self.held = {(part.tier, key) for part in parts for key in part.keys}
        self.next_sequence = parts[0].sequence + 1
        self.num_snapshots += 1

    def _apply(self, batch: KVEvents) -> None:
        if batch.sequence < self.next_sequence:
            return
        assert batch.sequence == self.next_sequence
        self.next_sequence += 1
        for event in batch.events:
            match event:
                case KVStored(tier, keys):
                    assert self.held.isdisjoint((tier, key) for key in keys)
                    self.held |= {(tier, key) for key in keys}
                case KVRemoved(tier, keys):
                    assert self.held >= {(tier, key) for key in keys}
                    self.held -= {(tier, key) for key in keys}
                case KVCleared():
                    self.held.clear()


@pytest.mark.parametrize("seed", range(6))
async def test_a_mirror_that_loses_batches_ends_with_the_pools_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(internal_events, "SNAPSHOT_PART_KEYS", 7)
    rng = random.Random(seed)
    pool = FakePool(capacity_batches=3)
    pool.store_batches(10)  # the start is lost already
    publisher = internal(pool, tmp_path, flush_interval_s=0.0)
    mirror = Mirror(publisher, rng)
    is_done = False

    async def change_the_pool() -> None:
        nonlocal is_done
        while mirror.num_snapshots == 0:
            await asyncio.sleep(0)
        for step in range(1500):
            pool.flip(rng.choice(list(Tier)), rng.choice(KEYS))
            if rng.random() < 0.01:
                pool.held.clear()
                pool.log.cleared()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            if step == 700:
                pool.store_batches(5)  # more than the log keeps: who follows it has lost some
        pool.log.seal()
        is_done = True

    async with running(publisher), asyncio.TaskGroup() as tasks:
        tasks.create_task(change_the_pool())
        await mirror.follow(lambda: is_done and mirror.next_sequence == pool.log.next_sequence)
    assert mirror.held == pool.held
    assert mirror.num_replays > 0
    assert mirror.num_snapshots > 1


@pytest.mark.usefixtures("small_queues")
async def test_who_asks_again_gets_a_newer_snapshot_instead(tmp_path: Path) -> None:
    num_parts = 60
    pool = FakePool()
    publisher = with_large_snapshot(pool, tmp_path, num_parts)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as dealer:
            await dealer.send(ENCODE(GetSnapshot()))
            await dealer.poll()
            pool.flip(DRAM, KEYS[0])
            await dealer.send(ENCODE(GetSnapshot()))
            sequences = []
            while not (part := DECODE(await dealer.recv())).is_last:
                sequences.append(part.sequence)
            assert sequences.count(part.sequence) == num_parts - 1
            older = [sequence for sequence in sequences if sequence != part.sequence]
            assert 0 < len(older) < num_parts - 1
            assert sequences == sorted(sequences)


MALFORMED_REQUESTS = [
    [b""],
    [b"\xff" * 5_000],
    [ENCODE({"type": "Abort"})],
    [ENCODE({"type": "ReplayEvents", "from_sequence": "first"})],
    [b"\x81\xa4type\xa4\xff\xff\xff\xff"],
    [b"\x82\xa1x" + b"\x91" * 20_000 + b"\xc0\xa4type\xabGetSnapshot"],
    [b"", ENCODE(GetSnapshot())],
    [b"x"] * 1_000,
]


@pytest.mark.parametrize("num", [1, 100])
@pytest.mark.parametrize("frames", MALFORMED_REQUESTS)
async def test_malformed_requests_are_logged_in_short_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frames: list[bytes], num: int
) -> None:
    with caplog.at_level(logging.WARNING):
        pool = FakePool()
        publisher = internal(pool, tmp_path)
        async with running(publisher):
            with connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as dealer:
                for _ in range(num):
                    await dealer.send_multipart(frames)
                await dealer.send(ENCODE(ReplayEvents(0)))
                assert (await replayed(dealer))[1] == ReplayDone("p0", 7, 1)
    assert len(caplog.records) == num.bit_length(), "each time they have doubled"
    assert all("malformed" in record.message and len(record.message) < 400 for record in caplog.records)
