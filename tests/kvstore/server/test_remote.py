"""The TCP door of a pool, and peers that do not keep to the protocol."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client.client import KVCachePool
from kvstore.client.leases import Lease
from kvstore.client.streamed import StreamedConnection
from kvstore.protocol.answers import (
    CallFailed,
    Connected,
    Detached,
    Done,
    ErrorKind,
    FromRemotePool,
    Leased,
    Reservation,
    Stats,
)
from kvstore.protocol.calls import (
    AwaitSpace,
    Commit,
    Connect,
    GetBlocks,
    GetStats,
    LeaseBlocks,
    PutBlocks,
    ReservePages,
    SealBlocks,
)
from kvstore.protocol.frames import FrameBuffer, encode_frame, max_keys
from kvstore.protocol.greeting import Challenge, Visitor
from kvstore.server import stalls
from kvstore.server.client_session import ClientSession
from kvstore.server.listing import pool_stats
from kvstore.server.service import Service
from messenger.rdma.cards import Cards
from messenger.wire.checksums import layer_checksums
from mooncake.config.sections import KVCacheConfig, MessengerConfig
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import PoolStats, Tier
from mooncake.node.process_config import MessengerProcess
from tests.examples import num_examples
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT
from tests.kvstore.pools import (
    Pool,
    Pools,
    block_of,
    buffers,
    keys_of,
    nothing_reserved,
    until,
    wait_until_listening,
)

pytestmark = pytest.mark.cluster

DECODER = msgspec.msgpack.Decoder(FromRemotePool)
SIZE = LAYOUT.block_bytes


class Peer:
    """A raw connection to a TCP door, of somebody who has the key."""

    def __init__(self, address: tuple[str, int], layout: KVLayout = LAYOUT, *, greet: bool = True) -> None:
        self.sock = socket.create_connection(address, DEADLINE_S)
        self._frames = FrameBuffer()
        visitor = Visitor(CLUSTER_KEY)
        self.send(visitor.greeting)
        self._fill()
        proof = visitor.answer(msgspec.msgpack.decode(self._frames.take_message()[0], type=Challenge))
        assert proof is not None
        self._frames.trust()
        self.send(proof)
        if greet:
            self.send(Connect(0, FINGERPRINT, layout, 1))
            assert isinstance(self.receive(), Connected)

    def send(self, message: msgspec.Struct, payload: bytes = b"", payload_bytes: int | None = None) -> None:
        size = len(payload) if payload_bytes is None else payload_bytes
        self.sock.sendall(encode_frame(message, size) + payload)

    def receive(self) -> FromRemotePool | None:
        """The next message; None when the connection has ended."""
        with contextlib.suppress(ConnectionError):
            self._fill()
            message: FromRemotePool = DECODER.decode(self._frames.take_message()[0])
            return message
        return None

    def _fill(self) -> None:
        while (room := self._frames.room_for_message()) is not None:
            num_bytes = self.sock.recv_into(room)
            if num_bytes == 0:
                raise ConnectionResetError("the pool has hung up")
            self._frames.received(num_bytes)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pools(tmp_path_factory.mktemp("remote")) as pools:
        yield pools.start("far")


@pytest.fixture
def door(pool: Pool) -> Iterator[tuple[str, int]]:
    """Where to connect. The pool is empty, and must be in order and serve others afterwards."""
    with pool.client(pool.tcp) as client:
        client.clear()
        yield door_of(pool)
        (key,) = keys_of(1)
        client.put([key], [block_of(key)])
        assert client.exists([key]) == [Tier.DRAM]
        until(client, nothing_reserved)


def door_of(pool: Pool) -> tuple[str, int]:
    host, port = pool.tcp.removeprefix("tcp://").split(":")
    return host, int(port)


def put_of(keys: Sequence[BlockKey], *, timeout_s: float = 1.0) -> tuple[PutBlocks, bytes]:
    blocks = [block_of(key) for key in keys]
    checksums = b"".join(layer_checksums(memoryview(block), LAYOUT.layer_bytes) for block in blocks)
    return PutBlocks(7, list(keys), checksums, timeout_s), b"".join(blocks)


def test_every_call_works_over_tcp_and_waiting_ones_hold_up_nobody(door: tuple[str, int]) -> None:
    with Peer(door) as peer:
        peer.send(AwaitSpace(1, 1 << 40))
        put, payload = put_of(keys_of(2))
        peer.send(put, payload)
        peer.send(LeaseBlocks(2, put.keys, 10))
        peer.send(GetStats(3, True))
        assert peer.receive() == Done(7)
        assert isinstance(peer.receive(), Leased)
        stats = peer.receive()
        assert isinstance(stats, Stats)
        assert (stats.stats.num_sealed, stats.stats.num_leases) == (2, 1)


def test_answers_to_calls_that_waited_come_by_themselves(door: tuple[str, int], pool: Pool) -> None:
    with Peer(door) as peer, pool.client() as client:
        keys = keys_of(16)
        client.put(keys, [block_of(key) for key in keys])
        with client.lease(keys):
            peer.send(ReservePages(1, keys_of(1), 0))
            full = peer.receive()
            assert isinstance(full, CallFailed)
            assert full.kind is ErrorKind.POOL_FULL
            peer.send(AwaitSpace(2, full.space_epoch))
        assert peer.receive() == Done(2)


GARBAGE = {
    "no frame": struct.pack("<IQ", 0, 0),
    "endless message": struct.pack("<IQ", 1 << 31, 0),
    "no msgpack": struct.pack("<IQ", 3, 0) + b"\xc1\xc1\xc1",
    "unknown message": struct.pack("<IQ", 14, 0) + msgspec.msgpack.encode({"type": "Nothing"}),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("greet", [True, False])
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_only_its_connection(door: tuple[str, int], garbage: bytes, greet: bool) -> None:
    with Peer(door, greet=greet) as peer:
        peer.sock.sendall(garbage)
        answer = peer.receive()
        assert answer is None or isinstance(answer, Detached)
        assert peer.receive() is None


@settings(max_examples=num_examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_any_bytes_end_only_their_connection(door: tuple[str, int], garbage: bytes, framed: bool) -> None:
    with Peer(door) as peer:
        peer.sock.sendall(struct.pack("<IQ", len(garbage), 0) + garbage if framed else garbage)


def test_first_message_must_be_connect(door: tuple[str, int]) -> None:
    with Peer(door, greet=False) as peer:
        peer.send(GetStats(1, False))
        detached = peer.receive()
        assert isinstance(detached, Detached)
        assert "the first message is GetStats; it must be Connect" in detached.reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_layers": -1}, "Expected `int` >= 0 - at `$.layout.num_layers`"),
        ({"head_dim": 0}, "each of its sizes must be at least 1"),
    ],
)
def test_new_pool_takes_no_impossible_layout(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    new = Pool(tmp_path, "new", 16, LAYOUT)
    with contextlib.closing(new):
        new.start()
        wait_until_listening(new.tcp)
        connect = msgspec.to_builtins(Connect(1, FINGERPRINT, LAYOUT, 1, may_format=True))
        connect["layout"].update(sizes)
        encoded = msgspec.msgpack.encode(connect)
        with Peer(door_of(new), greet=False) as peer:
            peer.sock.sendall(struct.pack("<IQ", len(encoded), 0) + encoded)
            refused = peer.receive()
            assert isinstance(refused, Detached)
            assert reason in refused.reason
        with KVCachePool.connect(
            new.tcp, fingerprint=FINGERPRINT, layout=LAYOUT, key_file=new.key_file
        ) as client:
            assert client.stats()["new"].num_pages == 16


@pytest.mark.parametrize(
    ("message", "payload_bytes", "reason"),
    [
        (GetStats(1, False), 5, "GetStats came with a payload"),
        (Commit(1, 0, 1, [0], bytes(8)), 0, "Commit is for those who have the pool's memory mapped"),
        (SealBlocks(1, 1, b""), 0, "SealBlocks is for those who have the pool's memory mapped"),
        (put_of(keys_of(2))[0], SIZE, f"2 blocks of {SIZE} bytes came with a payload of {SIZE} bytes"),
        (put_of(keys_of(1))[0], 1 << 60, f"came with a payload of {1 << 60} bytes"),
        (PutBlocks(1, [], b"", 1), 0, "0 blocks in one message"),
        (PutBlocks(1, keys_of(1), bytes(8), 1), SIZE, "1 blocks came with 8 bytes of checksums"),
        (put_of(keys_of(1), timeout_s=float("nan"))[0], SIZE, "a timeout of nan s"),
        (put_of(keys_of(1), timeout_s=float("inf"))[0], SIZE, "a timeout of inf s"),
    ],
)
def test_messages_that_no_client_sends_end_the_connection_with_a_reason(
    door: tuple[str, int], message: msgspec.Struct, payload_bytes: int, reason: str
) -> None:
    with Peer(door) as peer:
        peer.send(message, payload_bytes=payload_bytes)
        detached = peer.receive()
        assert isinstance(detached, Detached)
        assert reason in detached.reason
        assert peer.receive() is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (GetBlocks(7, keys_of(1), 2, 2), "layers [2, 2) are wanted, there are 4"),
        (GetBlocks(7, keys_of(1), -1, 2), "layers [-1, 2)"),
        (GetBlocks(7, keys_of(1), 0, 5), "layers [0, 5)"),
        (GetBlocks(7, [], 0, 1), "0 blocks in one message"),
        (GetBlocks(7, keys_of(max_keys(1) + 1), 0, 1), "4097 blocks in one message"),
        (GetBlocks(7, [b"short"], 0, 1), "a key of 5 bytes"),
    ],
)
def test_gets_that_cannot_be_answered_are_refused(
    door: tuple[str, int], call: GetBlocks, reason: str
) -> None:
    with Peer(door) as peer:
        peer.send(call)
        failed = peer.receive()
        assert isinstance(failed, CallFailed)
        assert reason in failed.message
        peer.send(GetStats(8, False))  # the connection goes on
        assert isinstance(peer.receive(), Stats)


def test_block_damaged_on_its_way_is_refused_and_the_rest_of_its_batch_does_not_hurt(
    door: tuple[str, int], pool: Pool
) -> None:
    keys = keys_of(3)
    put, payload = put_of(keys)
    damaged = bytearray(payload)
    damaged[SIZE + 5] ^= 1
    with Peer(door) as peer:
        peer.send(put, bytes(damaged))
        failed = peer.receive()
        assert isinstance(failed, CallFailed)
        assert failed.kind is ErrorKind.TRANSFER
        assert f"block {keys[1].hex()} was damaged on its way" in failed.message
        peer.send(put, payload)
        assert peer.receive() == Done(7)
    with pool.client() as client:
        assert client.exists(keys) == [Tier.DRAM] * 3


def test_key_of_a_wrong_length_is_refused_without_losing_the_stream(door: tuple[str, int]) -> None:
    put, payload = put_of(keys_of(1))
    with Peer(door) as peer:
        peer.send(msgspec.structs.replace(put, keys=[b"short"]), payload)
        failed = peer.receive()
        assert isinstance(failed, CallFailed)
        assert "a key of 5 bytes" in failed.message
        peer.send(put, payload)
        assert peer.receive() == Done(7)


@pytest.mark.parametrize("num_sent", [0, 100, SIZE, SIZE + 100])
def test_client_that_dies_in_the_middle_of_a_put_leaves_only_whole_blocks(
    door: tuple[str, int], pool: Pool, num_sent: int
) -> None:
    keys = keys_of(2)
    put, payload = put_of(keys)
    with pool.client() as client:
        with Peer(door) as peer:
            peer.send(put, payload[:num_sent], payload_bytes=len(payload))
            until(client, lambda stats: stats.num_reserved > 0)
        until(client, nothing_reserved)
        assert client.exists(keys) == [Tier.DRAM if num_sent >= SIZE else None, None]


def test_calls_without_end_are_refused(door: tuple[str, int]) -> None:
    with Peer(door) as peer:
        for call_id in range(300):
            peer.send(AwaitSpace(call_id, 1 << 40))
        detached = peer.receive()
        assert isinstance(detached, Detached)
        assert "more than 256 calls wait" in detached.reason


def test_client_that_does_not_read_is_not_read_from(door: tuple[str, int]) -> None:
    with Peer(door) as peer:
        peer.sock.settimeout(0.5)
        calls = encode_frame(GetStats(1, False)) * (1 << 20)  # their answers fill every buffer on the way
        with pytest.raises(TimeoutError):
            peer.sock.sendall(calls)


def test_damage_between_pool_and_client_is_noticed_by_the_client(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_block = StreamedConnection._receive_block

    def receive_damaged(connection: StreamedConnection, block: memoryview) -> bytes:
        receive_block(connection, block)
        block[3] ^= 1
        return layer_checksums(block, LAYOUT.layer_bytes)

    with pool.client(pool.tcp) as client:
        (key,) = keys_of(1)
        client.put([key], [block_of(key)])
        monkeypatch.setattr(StreamedConnection, "_receive_block", receive_damaged)
        assert client.get([key], buffers(1)) == [False]
        assert client.exists([key]) == [Tier.DRAM]  # the pool has looked: its copy is intact


def test_server_of_something_else_is_recognised(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with ThreadPoolExecutor() as threads:
            connecting = threads.submit(
                KVCachePool.connect, address, timeout_s=DEADLINE_S, key_file=pool.key_file
            )
            with listener.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                with pytest.raises(PoolError, match="answered what it should not: a frame announces"):
                    connecting.result()


# -- deadlines, shortened in a messenger within this process ----------------------------------------

LARGE = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1024, block_size=1024, dtype="float32")


def with_little_patience(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[tuple[str, int], Callable[[], PoolStats]], None],
) -> None:
    """Runs `test(address, statistics)` beside a messenger that loses patience soon."""
    monkeypatch.setattr(stalls, "_GRACE_S", 0.1)
    monkeypatch.setattr(stalls, "_LEAST_BYTES_PER_S", 1 << 30)
    monkeypatch.setattr(stalls, "_IDLE_S", 0.2)
    monkeypatch.setattr(stalls, "_WATCH_S", 0.02)
    memory = os.memfd_create("remote")
    os.posix_fallocate(memory, 0, 80 << 20)
    config = MessengerProcess(
        cluster_key=CLUSTER_KEY,
        settings=MessengerConfig(),
        kvcache=KVCacheConfig(low_watermark=0, high_watermark=0),
        instance="here",
        incarnation=1,
        worker_socket="",
        peer_socket="",
        event_endpoints=(f"ipc://{folder}/events", f"ipc://{folder}/replay"),
        segment_fd=memory,
    )

    async def serve() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as tasks:
                service = Service(config, tasks, (), Cards([]))
                store = service.store_for(FINGERPRINT, LARGE)
                serving = tasks.create_task(service.accept_clients(listener))
                loop = asyncio.get_running_loop()

                async def look() -> PoolStats:
                    return pool_stats(store, check_integrity=True)

                def statistics() -> PoolStats:
                    return asyncio.run_coroutine_threadsafe(look(), loop).result(DEADLINE_S)

                await asyncio.to_thread(test, listener.getsockname(), statistics)
                ended.append(True)
                serving.cancel()
                raise asyncio.CancelledError

    ended: list[bool] = []
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve())
    os.close(memory)
    assert ended


def large_put() -> tuple[PutBlocks, bytes]:
    block = bytes(LARGE.block_bytes)
    checksums = layer_checksums(memoryview(block), LARGE.layer_bytes)
    return PutBlocks(7, keys_of(1), checksums, 0), block


def wait_for(statistics: Callable[[], PoolStats], condition: Callable[[PoolStats], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(statistics()):
        assert time.monotonic() < deadline
    assert statistics().integrity is None


def test_client_that_stalls_in_the_middle_of_a_put_loses_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test(address: tuple[str, int], statistics: Callable[[], PoolStats]) -> None:
        put, block = large_put()
        with Peer(address, LARGE) as peer:
            peer.send(put, block[:1000], payload_bytes=len(block))
            assert peer.receive() is None
            wait_for(statistics, nothing_reserved)

    with_little_patience(tmp_path, monkeypatch, test)


def test_client_that_does_not_take_what_it_asked_for_loses_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test(address: tuple[str, int], statistics: Callable[[], PoolStats]) -> None:
        put, block = large_put()
        is_leased, lease = threading.Event(), ClientSession.lease

        async def noted(session: ClientSession, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
            leased = await lease(session, keys, ttl_s)
            is_leased.set()
            return leased

        monkeypatch.setattr(ClientSession, "lease", noted)
        for limit in ("_GRACE_S", "_IDLE_S"):  # a busy machine may need long for the block
            monkeypatch.setattr(stalls, limit, DEADLINE_S)
        with Peer(address, LARGE) as peer:
            peer.send(put, block)
            assert peer.receive() == Done(7)
            monkeypatch.setattr(stalls, "_GRACE_S", 0.1)
            peer.send(GetBlocks(8, put.keys, 0, 2))
            assert is_leased.wait(DEADLINE_S)
            wait_for(statistics, nothing_reserved)
            num_received = 0
            with contextlib.suppress(ConnectionError):
                while num_bytes := len(peer.sock.recv(1 << 20)):
                    num_received += num_bytes
            assert num_received < len(block)

    with_little_patience(tmp_path, monkeypatch, test)


def test_silent_client_keeps_its_connection_but_no_reserved_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test(address: tuple[str, int], statistics: Callable[[], PoolStats]) -> None:
        with Peer(address, LARGE) as silent, Peer(address, LARGE) as greedy:
            greedy.send(ReservePages(1, keys_of(1), 0))
            assert isinstance(greedy.receive(), Reservation)
            assert greedy.receive() is None
            wait_for(statistics, nothing_reserved)
            silent.send(GetStats(2, False))
            assert isinstance(silent.receive(), Stats)

    with_little_patience(tmp_path, monkeypatch, test)


def test_put_whose_attempts_look_like_room_themselves_gives_up_in_time_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_attempts = 0

    async def move_blocks_in_vain(
        session: ClientSession, keys: Sequence[BlockKey], num_private: int
    ) -> Reservation:
        nonlocal num_attempts
        num_attempts += 1
        assert num_attempts < 100, "nobody else has a turn"
        session.store.pool.evictor.changed()
        raise PoolFullError("it is full again", session.store.pool.evictor.epoch)

    def test(address: tuple[str, int], statistics: Callable[[], PoolStats]) -> None:
        put, block = large_put()
        for limit in ("_GRACE_S", "_IDLE_S"):  # a busy machine may need long for the block
            monkeypatch.setattr(stalls, limit, DEADLINE_S)
        with Peer(address, LARGE) as peer:
            peer.send(msgspec.structs.replace(put, timeout_s=0.05), block)
            failed = peer.receive()
            assert isinstance(failed, CallFailed)
            assert failed.kind is ErrorKind.POOL_FULL
            assert "within 0.05 s: it is full again" in failed.message
        wait_for(statistics, nothing_reserved)
        assert num_attempts == 1

    monkeypatch.setattr(ClientSession, "reserve", move_blocks_in_vain)
    with_little_patience(tmp_path, monkeypatch, test)
