"""Deadlines of remote clients, shortened in a messenger within this process."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore.client.leases import Lease
from kvstore.protocol.answers import (
    CallFailed,
    Done,
    ErrorKind,
    Reservation,
    Stats,
)
from kvstore.protocol.calls import (
    GetBlocks,
    GetStats,
    PutBlocks,
    ReservePages,
)
from kvstore.server import stalls
from kvstore.server.client_session import ClientSession
from kvstore.server.listing import pool_stats
from kvstore.server.service import Service
from messenger.rdma.cards import Cards
from messenger.wire.checksums import layer_checksums
from mooncake.config.sections import KVCacheConfig, MessengerConfig
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import PoolStats
from mooncake.node.process_config import MessengerProcess
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT
from tests.kvstore.pools import (
    keys_of,
    nothing_reserved,
)
from tests.kvstore.server.remote_peers import Peer

pytestmark = pytest.mark.cluster


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
        raise PoolFullError("it is full again", session.store.pool.evictor.space_epoch)

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
