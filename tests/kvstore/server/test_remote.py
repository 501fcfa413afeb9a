"""The TCP door of a pool, and peers that do not keep to the protocol."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client.client import KVCachePool
from kvstore.client.streamed import StreamedConnection
from kvstore.protocol.answers import (
    CallFailed,
    Detached,
    Done,
    ErrorKind,
    Leased,
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
from kvstore.protocol.frames import encode_frame, max_keys
from messenger.wire.checksums import layer_checksums
from mooncake.errors import PoolError
from mooncake.messages.pools import Tier
from tests.examples import num_examples
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT
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
from tests.kvstore.server.remote_peers import SIZE, Peer, door_of, put_of

pytestmark = pytest.mark.cluster


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
