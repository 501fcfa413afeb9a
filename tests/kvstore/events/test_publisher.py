"""Real sockets on the loopback. Subscribers are written here as somebody else would write them."""

import asyncio
import contextlib
import logging
import random
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstore.events import internal as internal_events
from kvstore.events import publisher as event_publisher
from kvstore.events.batches import BlockTokens, EventLog
from kvstore.events.internal import InternalPublisher
from kvstore.events.vllm import VllmPublisher
from mooncake.errors import ConfigError
from mooncake.messages.kv_events import (
    EventsGone,
    FromKVEvents,
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
from mooncake.security.curve import use_key
from mooncake.security.keys import ClusterKey

DRAM, SSD = Tier.DRAM, Tier.SSD
KEYS = [bytes(8) + number.to_bytes(8, "big") for number in range(1, 41)]
DECODE = msgspec.msgpack.Decoder(FromKVEvents).decode
ENCODE = msgspec.msgpack.Encoder().encode
KEY = ClusterKey.generate()
Publisher = InternalPublisher | VllmPublisher


@contextlib.asynccontextmanager
async def running(*publishers: Publisher) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(publisher.run()) for publisher in publishers]
        yield
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def connected(
    kind: int, endpoint: str, rcvhwm: int = 10_000, key: ClusterKey | None = None
) -> Iterator[zmq.asyncio.Socket]:
    """`key` for internal events."""
    socket = zmq.asyncio.Context.instance().socket(kind)
    if key is not None:
        use_key(socket, key)
    socket.linger = 0
    socket.rcvhwm = rcvhwm
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()


class FakePool:
    """What the pool is to a log: it reports each change, and can say what it holds."""

    def __init__(self, capacity_batches: int = 100) -> None:
        self.log = EventLog(capacity_batches)
        self.held: set[tuple[Tier, bytes]] = set()

    def flip(self, tier: Tier, key: bytes) -> None:
        if (tier, key) in self.held:
            self.held.remove((tier, key))
            self.log.removed(tier, key)
        else:
            self.held.add((tier, key))
            self.log.stored(tier, key)

    def snapshot(self) -> Iterable[tuple[Tier, list[bytes]]]:
        for tier in Tier:
            yield tier, [key for held_tier, key in self.held if held_tier is tier]

    def store_batches(self, num_batches: int) -> None:
        """As many sealed batches, each of one event."""
        for number in range(num_batches):
            self.flip(DRAM, KEYS[number % len(KEYS)])
            self.log.seal()


def internal(pool: FakePool, path: Path, flush_interval_s: float = 0.001) -> InternalPublisher:
    return InternalPublisher(
        pool.log,
        pool.snapshot,
        instance="p0",
        incarnation=7,
        endpoint=f"ipc://{path}/events",
        request_endpoint="tcp://127.0.0.1:0",
        key=KEY,
        flush_interval_s=flush_interval_s,
    )


def with_large_snapshot(pool: FakePool, path: Path, num_parts: int) -> InternalPublisher:
    """Its snapshots have parts of 180 KB: a few are more than sockets buffer."""
    keys = [number.to_bytes(16, "big") for number in range(10_000 * num_parts)]
    return InternalPublisher(
        pool.log,
        lambda: [(DRAM, keys)],
        instance="p0",
        incarnation=7,
        endpoint=f"ipc://{path}/events",
        request_endpoint=f"ipc://{path}/requests",
        key=KEY,
        flush_interval_s=0.001,
    )


@pytest.fixture
def small_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_events, "SNAPSHOT_PART_KEYS", 10_000)
    monkeypatch.setattr(event_publisher, "ANSWER_QUEUE_LEN", 1)
    monkeypatch.setattr(event_publisher, "ANSWER_TIMEOUT_S", 0.2)


def vllm(
    log: EventLog, path: Path, clock: Callable[[], float] = lambda: 12.5, topic: str = "kv@10.0.0.1@m"
) -> VllmPublisher:
    return VllmPublisher(
        log,
        clock=clock,
        endpoint="tcp://127.0.0.1:0",
        replay_endpoint=f"ipc://{path}/replay",
        topic=topic,
        flush_interval_s=0.001,
    )


async def first_message(subscriber: zmq.asyncio.Socket, make_event: Callable[[], None]) -> list[bytes]:
    """Makes events until one is received: from then on, the subscription is known to the publisher."""
    while not await subscriber.poll(20):
        make_event()
    frames: list[bytes] = await subscriber.recv_multipart()
    return frames


async def replayed(dealer: zmq.asyncio.Socket) -> tuple[list[KVEvents], ReplayDone | EventsGone]:
    batches = []
    while isinstance(message := DECODE(await dealer.recv()), KVEvents):
        batches.append(message)
    assert isinstance(message, ReplayDone | EventsGone)
    return batches, message


async def snapshot_of(dealer: zmq.asyncio.Socket) -> list[KVSnapshot]:
    parts: list[KVSnapshot] = []
    while not parts or not parts[-1].is_last:
        message = DECODE(await dealer.recv())
        assert isinstance(message, KVSnapshot)
        parts.append(message)
    return parts


# -- internal events ----------------------------------------------------------------------------------


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


# -- those who do not read ----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_queues")
async def test_peer_that_does_not_read_its_answer_holds_up_nobody_and_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_parts = 60

    with caplog.at_level(logging.WARNING):
        pool = FakePool()
        publisher = with_large_snapshot(pool, tmp_path, num_parts)
        async with running(publisher):
            with (
                connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as stuck,
                connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as other,
                connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber,
            ):
                await stuck.send(ENCODE(GetSnapshot()))
                await stuck.poll()  # the answer has begun
                await first_message(subscriber, lambda: pool.flip(DRAM, KEYS[0]))
                while "does not read" not in caplog.text:
                    await other.send(ENCODE(ReplayEvents(pool.log.next_sequence)))
                    assert isinstance((await replayed(other))[1], ReplayDone)
                # It is only this answer that was given up.
                num_read = 0
                while await stuck.poll(200):
                    await stuck.recv()
                    num_read += 1
                assert 0 < num_read < num_parts
                await stuck.send(ENCODE(ReplayEvents(0)))
                assert (await replayed(stuck))[0]


async def test_peer_that_reads_slowly_gets_all_of_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "ANSWER_QUEUE_LEN", 2)
    num_batches = 3_000
    pool = FakePool(capacity_batches=num_batches)
    pool.store_batches(num_batches)
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as dealer:
            await dealer.send(ENCODE(ReplayEvents(0)))
            batches, end = await replayed(dealer)
            assert [batch.sequence for batch in batches] == list(range(num_batches))
            assert isinstance(end, ReplayDone)


@pytest.mark.usefixtures("small_queues")
async def test_no_more_than_so_many_peers_are_answered_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_publisher, "MAX_ANSWERS", 2)

    with caplog.at_level(logging.WARNING):
        publisher = with_large_snapshot(FakePool(), tmp_path, num_parts=40)
        async with running(publisher):
            with contextlib.ExitStack() as sockets:
                for _ in range(2):
                    stuck = sockets.enter_context(
                        connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1)
                    )
                    await stuck.send(ENCODE(GetSnapshot()))
                    await stuck.poll()
                other = sockets.enter_context(connected(zmq.DEALER, publisher.request_endpoint, key=KEY))
                await other.send(ENCODE(ReplayEvents(0)))
                assert isinstance((await replayed(other))[1], ReplayDone)
                assert "does not read" in caplog.text, "it waited for its turn"


async def test_subscriber_that_does_not_read_loses_batches_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "PUB_QUEUE_LEN", 10)
    num_batches = 2_000
    pool = FakePool(capacity_batches=num_batches)
    publisher = internal(pool, tmp_path, flush_interval_s=0.0)
    async with running(publisher):
        with connected(zmq.SUB, publisher.endpoint, key=KEY, rcvhwm=10) as stuck:
            await first_message(stuck, lambda: pool.flip(SSD, KEYS[0]))
            with connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber:
                await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
                for _ in range(num_batches):
                    for key in KEYS:
                        pool.flip(DRAM, key)
                    pool.log.seal()
                    await asyncio.sleep(0)
                last_sequence, sequence = pool.log.next_sequence - 1, 0
                while sequence < last_sequence:  # a burst like this one is too much for any subscriber
                    frames = await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
                    sequence = DECODE(frames[1]).sequence
            sequences = []
            while await stuck.poll(100):
                sequences.append(DECODE((await stuck.recv_multipart())[1]).sequence)
            assert sequences == sorted(sequences)
            assert len(sequences) < 800  # those that the kernel buffers, and the queues


# -- life of a publisher ------------------------------------------------------------------------------


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


# -- vLLM's format ------------------------------------------------------------------------------------


class VllmEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(VllmEvent):
    """Fields without a default must be there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


DECODE_VLLM = msgspec.msgpack.Decoder(VllmBatch).decode
END = b"\xff" * 8


def key(number: int) -> bytes:
    return b"\xaa" * 8 + number.to_bytes(8, "big")


def tokens(parent: int | None, *token_ids: int) -> BlockTokens:
    return BlockTokens(None if parent is None else key(parent), array("I", token_ids))


def stored(hashes: list[int], parent: int | None, token_ids: list[int], medium: str = "CPU") -> BlockStored:
    return BlockStored(hashes, parent, token_ids, 2 if token_ids else 0, None, medium, None)


async def published_events(tmp_path: Path, fill: Callable[[EventLog], None]) -> list[Any]:
    """What a router gets by replay of the one batch that `fill` makes."""
    events: list[Any] = []
    log = EventLog(10)
    log.seal()
    fill(log)
    log.seal()
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint) as dealer:
            while not events:  # until it has been published
                await dealer.send_multipart([b"", (1).to_bytes(8, "big")])
                while (frames := await dealer.recv_multipart())[-2] != END:
                    events.extend(DECODE_VLLM(frames[-1]).events)
    return events


async def test_live_frames_are_topic_number_and_batch(tmp_path: Path) -> None:
    log = EventLog(10)
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with connected(zmq.SUB, publisher.endpoint) as router:
            await first_message(router, log.cleared)
            log.stored(DRAM, key(2), tokens(None, 20, 21))
            log.stored(DRAM, key(2**64 - 1), tokens(2, 30, 31))
            log.removed(SSD, key(3))
            sequence = log.next_sequence
            while (frames := await router.recv_multipart())[1] != sequence.to_bytes(8, "big"):
                pass
            topic, _, payload = frames
            assert topic == b"kv@10.0.0.1@m"
            raw = msgspec.msgpack.decode(payload)
            assert raw[0] == 12.5
            assert raw[1][0]["type"] == "BlockStored"
            assert raw[2] == 0
            assert raw[1][1] == {"type": "BlockRemoved", "block_hashes": [3], "medium": "DISK"}
            assert DECODE_VLLM(payload).events == [
                stored([2, 2**64 - 1], None, [20, 21, 30, 31]),
                BlockRemoved([3], "DISK"),
            ]


@pytest.mark.parametrize("envelope", [[b""], []])
async def test_vllm_replay_repeats_the_live_messages_and_ends_with_minus_one(
    tmp_path: Path, envelope: list[bytes]
) -> None:
    log, times = EventLog(100), iter(range(1000))
    publisher = vllm(log, tmp_path, clock=lambda: float(next(times)))
    async with running(publisher):
        with (
            connected(zmq.SUB, publisher.endpoint) as router,
            connected(zmq.DEALER, publisher.request_endpoint) as peer,
            connected(zmq.REQ, publisher.request_endpoint) as simple_peer,
        ):
            live = [await first_message(router, log.cleared)]
            first_sequence = int.from_bytes(live[0][1], "big")
            for number in range(5):
                log.stored(DRAM, key(number), tokens(None, number, number))
                log.seal()
            last_sequence = log.next_sequence - 1
            while int.from_bytes(live[-1][1], "big") < last_sequence:
                live.append(await router.recv_multipart())

            for start in range(first_sequence, last_sequence + 2):
                await peer.send_multipart([*envelope, start.to_bytes(8, "big")])
                answer = [await peer.recv_multipart()]
                while answer[-1] != [*envelope, b"", END, b""]:
                    answer.append(await peer.recv_multipart())
                assert answer[:-1] == [[*envelope, *frames] for frames in live[start - first_sequence :]]
            await simple_peer.send(first_sequence.to_bytes(8, "big"))
            assert await simple_peer.recv_multipart() == live[0]


async def test_vllm_replay_begins_with_the_oldest_batch_that_is_left(tmp_path: Path) -> None:
    log = EventLog(3)
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with (
            connected(zmq.SUB, publisher.endpoint) as router,
            connected(zmq.DEALER, publisher.request_endpoint) as peer,
        ):
            while int.from_bytes((await first_message(router, log.cleared))[1], "big") < 5:
                pass
            await peer.send_multipart([b"", bytes(8)])
            sequences = []
            while (frames := await peer.recv_multipart())[2] != END:
                sequences.append(int.from_bytes(frames[2], "big"))
            assert len(sequences) == 3
            assert sequences == list(range(sequences[0], sequences[0] + 3))
            assert sequences[0] >= 3


async def test_vllm_life_begins_with_all_blocks_cleared(tmp_path: Path) -> None:
    publisher = vllm(EventLog(10), tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint) as peer:
            frames = [b"", b"", END, b""]
            while frames[2] == END:
                await peer.send_multipart([b"", bytes(8)])
                frames = await peer.recv_multipart()
            assert frames[2] == bytes(8)
            assert DECODE_VLLM(frames[3]).events == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b""], [b"1"], [b"", b"x" * 900], [b"x", bytes(8)], [b"", b"", bytes(8)]]
)
async def test_vllm_malformed_requests_are_logged_in_short_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frames: list[bytes]
) -> None:
    with caplog.at_level(logging.WARNING):
        publisher = vllm(EventLog(10), tmp_path)
        async with running(publisher):
            with connected(zmq.DEALER, publisher.request_endpoint) as peer:
                await peer.send_multipart(frames)
                await peer.send_multipart([b"", END])
                assert await peer.recv_multipart() == [b"", b"", END, b""]
    [record] = caplog.records
    assert "malformed" in record.message
    assert len(record.message) < 400


async def test_blocks_that_follow_each_other_are_one_event(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(1), tokens(None, 10, 11))
        log.stored(DRAM, key(2), tokens(1, 20, 21))
        log.stored(DRAM, key(5), tokens(4, 50, 51))
        log.stored(DRAM, key(6), tokens(5, 60, 61))
        log.stored(DRAM, key(1), tokens(None, 10, 11))  # routers refuse an event that names a block twice

    assert await published_events(tmp_path, fill) == [
        stored([1, 2], None, [10, 11, 20, 21]),
        stored([5, 6], 4, [50, 51, 60, 61]),
    ]


async def test_parents_come_before_their_children_whatever_the_order_of_sealing(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(4), tokens(2, 40, 41))
        log.stored(DRAM, key(3), tokens(2, 30, 31))
        log.stored(DRAM, key(5), tokens(3, 50, 51))
        log.stored(DRAM, key(2), tokens(1, 20, 21))
        log.stored(DRAM, key(1), tokens(None, 10, 11))

    assert await published_events(tmp_path, fill) == [
        stored([1, 2], None, [10, 11, 20, 21]),
        stored([4], 2, [40, 41]),
        stored([3, 5], 2, [30, 31, 50, 51]),
    ]


async def test_blocks_without_known_tokens_are_announced_by_their_hash_alone(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(7))
        log.stored(DRAM, key(1), tokens(None, 10, 11))
        log.stored(DRAM, key(8))
        log.stored(SSD, key(1))  # in the same batch, so its tokens are known
        log.stored(SSD, key(9))
        log.removed(DRAM, key(9))

    assert await published_events(tmp_path, fill) == [
        stored([1], None, [10, 11]),
        stored([7, 8], None, []),
        stored([1], None, [10, 11], "DISK"),
        stored([9], None, [], "DISK"),
        BlockRemoved([9], "CPU"),
    ]
