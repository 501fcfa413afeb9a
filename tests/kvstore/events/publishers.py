"""Publishers of KV events on the loopback interface, and subscribers as other programs would write them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvstore.events.batches import EventLog
from kvstore.events.internal import InternalPublisher
from kvstore.events.vllm import VllmPublisher
from mooncake.messages.kv_events import (
    EventsGone,
    FromKVEvents,
    KVEvents,
    KVSnapshot,
    ReplayDone,
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
    """Make a context with a connected socket. Internal events need a `key`."""
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
    """A fake pool that reports each change to an event log, and can list what it holds."""

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
        """Seal this number of batches of one event each."""
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
    """Return a publisher whose snapshots have `num_parts` parts of 180 KB.

    A few of them fill socket buffers.
    """
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
    """Make events until the subscriber receives one, and return it.

    From then on the publisher knows the subscription.
    """
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
