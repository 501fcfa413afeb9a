"""The follower beside an engine's sockets: what is missing is replayed, what is lost is forgotten."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from mooncake.messages.kv_events import KVRemoved, KVStored
from tests.deadline import DEADLINE_S
from tests.workers.vllm.events import HASHES, KEYS, SIZE, payload, removed, stored
from workers.vllm.cached_blocks import Change
from workers.vllm.kv_events import KVEventFollower

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Engine:
    """Publishes batches as vLLM does, and keeps the last ones for replays."""

    def __init__(self, folder: Path) -> None:
        context = zmq.asyncio.Context.instance()
        self.endpoints = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self.published, self.replays = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.published.bind(self.endpoints[0])
        self.replays.bind(self.endpoints[1])
        self.batches: list[bytes] = []
        self.oldest = 0
        """The first batch that is kept."""

    async def until_followed(self) -> None:
        """Wait for the subscription, behind which every batch arrives."""
        async with asyncio.timeout(DEADLINE_S):
            await self.published.recv()

    async def publish(self, batch: bytes, *, is_lost: bool = False) -> None:
        self.batches.append(batch)
        if not is_lost:
            number = len(self.batches) - 1
            await self.published.send_multipart([b"", number.to_bytes(8, "big"), batch])

    async def answer_replays(self) -> None:
        while True:
            client, _, start = await self.replays.recv_multipart()
            for number in range(max(self.oldest, int.from_bytes(start, "big")), len(self.batches)):
                batch = [number.to_bytes(8, "big"), self.batches[number]]
                await self.replays.send_multipart([client, b"", b"", *batch])
            await self.replays.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self.published.close(linger=0)
        self.replays.close(linger=0)


class Mirror:
    """The blocks that the follower tells of."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.changed = asyncio.Event()

    async def __call__(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case KVStored():
                    self.keys.update(change.keys)
                case KVRemoved():
                    self.keys.difference_update(change.keys)
        self.changed.set()

    async def until(self, keys: list[bytes]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.keys != set(keys):
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path)
    answering = asyncio.create_task(engine.answer_replays())
    yield engine
    answering.cancel()
    engine.close()


@contextlib.asynccontextmanager
async def following(follower: KVEventFollower) -> AsyncIterator[Mirror]:
    mirror = Mirror()
    task = asyncio.create_task(follower.follow(mirror))
    try:
        yield mirror
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_came_before_and_what_was_missed_is_replayed(engine: Engine) -> None:
    await engine.publish(payload(stored(0, 2)))
    with contextlib.closing(KVEventFollower(*engine.endpoints, SIZE)) as follower:
        async with following(follower) as mirror:
            await mirror.until(KEYS[:2])
            await engine.publish(payload(removed(HASHES[1:2])))
            await engine.until_followed()
            await engine.publish(payload(stored(1, 3)), is_lost=True)
            await engine.publish(payload(stored(3, 4)))
            await mirror.until(KEYS[:4])


async def test_blocks_are_forgotten_when_batches_are_lost_for_ever(engine: Engine) -> None:
    with contextlib.closing(KVEventFollower(*engine.endpoints, SIZE)) as follower:
        async with following(follower) as mirror:
            await engine.until_followed()
            await engine.publish(payload(stored(0, 3)))
            await mirror.until(KEYS[:3])
            await engine.publish(payload(removed(HASHES[:1])), is_lost=True)
            engine.oldest = len(engine.batches)
            await engine.publish(payload(stored(0, 1)))
            await mirror.until(KEYS[:1])


async def test_the_next_session_is_told_everything(engine: Engine) -> None:
    await engine.publish(payload(stored(0, 4)))
    with contextlib.closing(KVEventFollower(*engine.endpoints, SIZE)) as follower:
        async with following(follower) as first:
            await first.until(KEYS[:4])
        await engine.publish(payload(removed(HASHES[2:4])))
        async with following(follower) as second:
            await second.until(KEYS[:2])
