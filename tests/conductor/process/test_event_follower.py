"""The follower and the pools' real publishers, in one process, over the loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from conductor.index import event_stream
from conductor.policy import Conductor
from conductor.process.event_follower import EventFollower
from conductor.settings import Limits
from kvstore.events import internal
from kvstore.events.batches import EventLog
from kvstore.events.internal import InternalPublisher
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import Capacity, MessengerAddress, PoolShard, Tier
from mooncake.messages.workers import PROTOCOL_VERSION, Leave, Register, Role
from mooncake.security.keys import ClusterKey

DRAM, SSD = Tier.DRAM, Tier.SSD
KEYS = [number.to_bytes(16, "big") for number in range(1, 41)]
KEY = ClusterKey.generate()
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


class Pool:
    """One messenger, as far as its events go."""

    def __init__(self, folder: Path, name: str, incarnation: int = 1, keys: Iterable[bytes] = ()) -> None:
        self.log = EventLog(20)
        self.held = dict.fromkeys(keys, DRAM)
        """Blocks adopted from an earlier life, of which no event tells."""
        self.publisher = InternalPublisher(
            self.log,
            self._snapshot,
            instance=name,
            incarnation=incarnation,
            endpoint=f"ipc://{folder}/{name}-events",
            request_endpoint=f"ipc://{folder}/{name}-requests",
            key=KEY,
            flush_interval_s=0.001,
        )
        endpoints = self.publisher.endpoint, self.publisher.request_endpoint
        self.address = MessengerAddress(name, incarnation, "host", "/path", (), endpoints)

    def store(self, tier: Tier, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.held[key] = tier
            self.log.stored(tier, key)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.log.removed(self.held.pop(key), key)

    def _snapshot(self) -> Iterable[tuple[Tier, list[bytes]]]:
        for tier in Tier:
            yield tier, [key for key, held_in in self.held.items() if held_in is tier]


class Cluster:
    """A Conductor that follows; what `conductor.process.service` does, without its socket."""

    def __init__(self) -> None:
        self.conductor = Conductor(1, "model", Limits())
        self.follower = EventFollower(self.conductor.prefixes, KEY)
        self._tasks = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "Cluster":
        await self._tasks.__aenter__()
        self._running["follower"] = self._tasks.create_task(self.follower.run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._running.values():
            task.cancel()
        await self._tasks.__aexit__(None, None, None)
        self.follower.close()

    def start(self, pool: Pool) -> None:
        self._running[pool.address.instance] = self._tasks.create_task(pool.publisher.run())

    async def stop(self, pool: Pool) -> None:
        task = self._running.pop(pool.address.instance)
        task.cancel()
        await asyncio.wait([task])

    def register(self, name: str, *addresses: MessengerAddress, incarnation: int = 1) -> None:
        shards = tuple(PoolShard(address, LAYOUT) for address in addresses)
        capacity = Capacity(100, 100, 32)
        message = Register(
            PROTOCOL_VERSION, name, incarnation, Role.PREFILL, "model", LAYOUT, shards, capacity, "cpu"
        )
        self.conductor.handle(peer_identity(name, incarnation), message, 0.0)
        self.follower.follow(self.conductor.instances)

    def leave(self, name: str) -> None:
        self.conductor.handle(peer_identity(name, 1), Leave(), 0.0)
        self.follower.follow(self.conductor.instances)

    def matched(self, name: str) -> tuple[int, int]:
        match = self.conductor.prefixes.match(KEYS)
        slot = self.conductor.prefixes.slots[name]
        return int(match.num_blocks[slot]), int(match.num_dram_blocks[slot])

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def following(cluster: Cluster, *pools: Pool) -> AsyncIterator[None]:
    for pool in pools:
        cluster.start(pool)
        cluster.register(pool.address.instance, pool.address)
    await cluster.until(
        lambda: all(cluster.follower.streams[pool.address.instance].is_current for pool in pools)
    )
    yield


async def test_the_index_follows_what_every_pool_holds(tmp_path: Path) -> None:
    async with Cluster() as cluster:
        p0, d0 = Pool(tmp_path, "p0"), Pool(tmp_path, "d0", keys=KEYS[:3])
        p0.store(DRAM, KEYS[:5])
        async with following(cluster, p0, d0):
            assert (cluster.matched("p0"), cluster.matched("d0")) == ((5, 5), (3, 3))
            p0.store(SSD, KEYS[5:8])
            d0.remove(KEYS[1:2])
            await cluster.until(lambda: (cluster.matched("p0"), cluster.matched("d0")) == ((8, 5), (1, 1)))
            streams = cluster.follower.streams.values()
            assert all(stream.num_snapshots == 1 and stream.num_gaps == 0 for stream in streams)


async def test_a_snapshot_of_many_parts_and_a_group_of_two_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal, "SNAPSHOT_PART_KEYS", 7)

    async with Cluster() as cluster:
        first, second = Pool(tmp_path, "p0.0", keys=KEYS), Pool(tmp_path, "p0.1", keys=KEYS[:30])
        cluster.start(first)
        cluster.start(second)
        cluster.register("p0", first.address, second.address)
        await cluster.until(lambda: cluster.matched("p0") == (30, 30))


async def test_batches_that_were_lost_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "QUIET_S", 0.05)
    monkeypatch.setattr("conductor.process.event_follower.TICK_S", 0.02)

    async with Cluster() as cluster:
        pool = Pool(tmp_path, "p0")
        async with following(cluster, pool):
            stream = cluster.follower.streams["p0"]
            pool.publisher._pub.unbind(pool.publisher.endpoint)
            pool.store(DRAM, KEYS[:3])
            await cluster.until(lambda: cluster.matched("p0") == (3, 3))
            for key in KEYS[3:]:  # more than the log keeps
                pool.store(DRAM, [key])
                pool.log.seal()
            await cluster.until(lambda: cluster.matched("p0") == (40, 40))
            assert stream.num_snapshots <= 2


async def test_another_life_of_a_messenger_is_followed_from_its_snapshot_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "QUIET_S", 0.05)
    monkeypatch.setattr(event_stream, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("conductor.process.event_follower.TICK_S", 0.02)

    async with Cluster() as cluster:
        pool = Pool(tmp_path, "p0", keys=KEYS[:5])
        async with following(cluster, pool):
            await cluster.stop(pool)
            successor = Pool(tmp_path, "p0", incarnation=2, keys=KEYS[:2])
            cluster.start(successor)
            await cluster.until(lambda: cluster.matched("p0") == (2, 2))
            # Its worker has noticed: another life of the instance, with another address.
            cluster.register("p0", successor.address, incarnation=2)
            assert cluster.matched("p0") == (0, 0)
            await cluster.until(lambda: cluster.matched("p0") == (2, 2))


async def test_few_snapshots_are_loaded_at_a_time_and_dead_messengers_hold_up_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conductor.process.event_follower.MAX_LOADING", 1)
    monkeypatch.setattr(event_stream, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("conductor.process.event_follower.TICK_S", 0.02)

    async with Cluster() as cluster:
        for name in ("dead-0", "dead-1"):
            nobody = f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}-requests"
            cluster.register(name, MessengerAddress(name, 1, "host", "/path", (), nobody))
        pools = [Pool(tmp_path, f"p{number}", keys=KEYS[: number + 1]) for number in range(5)]
        async with following(cluster, *pools):
            assert [cluster.matched(f"p{number}")[0] for number in range(5)] == [1, 2, 3, 4, 5]
            assert cluster.matched("dead-0") == (0, 0)


async def test_a_messenger_that_leaves_is_forgotten_and_may_come_back(tmp_path: Path) -> None:
    async with Cluster() as cluster:
        p0, d0 = Pool(tmp_path, "p0", keys=KEYS[:5]), Pool(tmp_path, "d0", keys=KEYS[:4])
        async with following(cluster, p0, d0):
            for _ in range(3):
                cluster.leave("p0")
                assert list(cluster.follower.streams) == ["d0"]
                p0.store(DRAM, KEYS[5:9])
                cluster.register("p0", p0.address)
                assert (cluster.matched("p0"), cluster.matched("d0")) == ((0, 0), (4, 4))
                await cluster.until(lambda: cluster.matched("p0") == (9, 9))


async def test_a_messenger_without_events_and_one_at_no_address_are_no_holders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster() as cluster:
        pool = Pool(tmp_path, "d0", keys=KEYS[:4])
        cluster.register("p0", MessengerAddress("p0", 1, "host", "/path", ()))
        cluster.register("p1", MessengerAddress("p1", 1, "host", "/path", (), ("nowhere", "tcp://x:y")))
        async with following(cluster, pool):
            assert list(cluster.follower.streams) == ["d0"]
            cluster.leave("p1")
            assert cluster.matched("p0") == (0, 0)
    assert "cannot follow the KV events of p1" in caplog.text
