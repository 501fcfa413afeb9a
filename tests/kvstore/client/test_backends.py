"""Pools that are killed, stopped and started again under their clients."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.client import mapped
from kvstore.client.backends import Backend
from kvstore.client.client import KVCachePool
from mooncake.errors import ConfigError, MismatchError, PoolError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier
from mooncake.security.keys import ClusterKey
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT, ROOT
from tests.kvstore.pools import (
    Pool,
    Pools,
    block_of,
    buffers,
    connected,
    keys_of,
    nothing_reserved,
    until,
    wait_until_listening,
)

pytestmark = pytest.mark.cluster


@dataclass
class Watched:
    """What becomes of a client's pools that do not answer."""

    num_lost: int = 0
    """by a call, which was held up"""
    num_tried_again: int = 0
    """in passing"""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched, lose, reconnect = Watched(), Backend._lose, Backend._reconnect

    def noted(backend: Backend, error: Exception) -> None:
        watched.num_lost += threading.current_thread() is threading.main_thread()
        lose(backend, error)

    def tried(backend: Backend) -> None:
        watched.num_tried_again += 1
        reconnect(backend)

    monkeypatch.setattr(Backend, "_lose", noted)
    monkeypatch.setattr(Backend, "_reconnect", tried)
    return watched


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    with Pools(tmp_path) as pools:
        yield pools


def store(client: KVCachePool, num_blocks: int) -> list[BlockKey]:
    keys = keys_of(num_blocks)
    client.put(keys, [block_of(key) for key in keys])
    return keys


def assert_reads(client: KVCachePool, keys: list[BlockKey]) -> None:
    for key in keys:
        out = buffers(1)
        assert client.get([key], out) == [True]
        assert out[0] == block_of(key)


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_restarted_pool_is_used_again_without_an_error(pools: Pools, door: str) -> None:
    pool = pools.start()
    with pool.client(getattr(pool, door)) as client:
        keys = store(client, 3)
        pool.kill()
        pool.start()
        pool.ready()
        assert_reads(client, keys)
        store(client, 1)


def test_lost_pool_is_an_error_until_it_comes_back(pools: Pools) -> None:
    pool = pools.start()
    with pool.client() as client:
        keys = store(client, 2)
        pool.kill()
        for _ in range(2):
            with pytest.raises(PoolError, match=r"no pool answers: nobody listens at unix:.*refused"):
                client.exists(keys)
        pool.start()
        pool.ready()
        assert_reads(client, keys)


@pytest.mark.parametrize("killed", ["first", "second"])
@pytest.mark.parametrize("doors", [("unix", "unix"), ("unix", "tcp")])
def test_killed_holder_of_replicas_fails_no_get(
    pools: Pools, watched: Watched, killed: str, doors: tuple[str, str]
) -> None:
    first, second = pools.start("first", 64), pools.start("second", 64)
    addresses = [getattr(pool, door) for pool, door in zip((first, second), doors, strict=True)]
    with connected(*addresses, fingerprint=FINGERPRINT, layout=LAYOUT, key_file=first.key_file) as client:
        keys = store(client, 50)
        for key in keys:
            assert client.change_replica(key, 2).instances == ["first", "second"]
        (first if killed == "first" else second).kill()
        assert_reads(client, keys)
        assert client.exists(keys) == [Tier.DRAM] * 50
        assert watched.num_lost <= 1


def test_killed_pool_counts_again_a_second_after_it_is_back(pools: Pools) -> None:
    first, second = pools.start("first"), pools.start("second")
    with connected(first.unix, second.unix, fingerprint=FINGERPRINT, layout=LAYOUT) as client:
        only_first = store(client, 2)
        first.kill()
        assert client.exists(only_first) == [None, None]
        stored_meanwhile = store(client, 2)
        first.start()
        first.ready()
        deadline = time.monotonic() + DEADLINE_S
        while client.exists(only_first) == [None, None]:
            assert time.monotonic() < deadline
        assert_reads(client, [*only_first, *stored_meanwhile])
        assert set(client.stats()) == {"first", "second"}


def test_pool_that_was_down_from_the_start_is_found_later(pools: Pools) -> None:
    first, second = pools.start("first"), pools.start("second")
    with first.client() as client:
        keys = store(client, 1)
    first.kill()
    with connected(first.unix, second.unix) as client:
        assert client.exists(keys) == [None]
        first.start()
        first.ready()
        deadline = time.monotonic() + DEADLINE_S
        while client.exists(keys) == [None]:
            assert time.monotonic() < deadline


def test_stopped_pool_holds_up_one_call_and_then_none(pools: Pools, watched: Watched) -> None:
    first, second = pools.start("first"), pools.start("second")
    with connected(first.unix, second.unix, fingerprint=FINGERPRINT, layout=LAYOUT, timeout_s=1) as client:
        (key,) = store(client, 1)
        client.change_replica(key, 2)
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert_reads(client, [key])
        assert time.monotonic() - started >= 1
        deadline = time.monotonic() + DEADLINE_S
        while watched.num_tried_again < 2:
            assert time.monotonic() < deadline
            assert_reads(client, [key])
        assert watched.num_lost == 1
        first.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + DEADLINE_S
        while "first" not in client.stats():
            assert time.monotonic() < deadline


def deploy_anew(pool: Pool) -> None:
    """In place of `pool`, with empty memory. Returns when it serves; it has no layout yet."""
    pool.kill()
    os.ftruncate(pool.segment_fd, 0)
    os.posix_fallocate(pool.segment_fd, 0, 1 << 20)
    pool.start()
    wait_until_listening(pool.tcp)


@pytest.mark.parametrize("door", ["unix", "tcp"])
@pytest.mark.parametrize("was_told", [True, False])
def test_old_client_does_not_format_a_new_pool(pools: Pools, door: str, was_told: bool) -> None:
    pool = pools.start()
    told = {"fingerprint": FINGERPRINT, "layout": LAYOUT} if was_told else {}
    with connected(getattr(pool, door), key_file=pool.key_file, **told) as client:
        keys = store(client, 1)
        deploy_anew(pool)
        with pytest.raises(PoolError, match=r"no pool answers: .* has no pool yet"):
            client.exists(keys)
        connected(pool.unix, fingerprint="another", layout=LAYOUT).close()  # not refused


def test_what_was_learned_from_one_pool_does_not_format_another(pools: Pools, tmp_path: Path) -> None:
    pool, new = pools.start(), Pool(tmp_path, "new", 16, LAYOUT)
    with contextlib.closing(new):
        new.start()
        wait_until_listening(new.tcp)
        with pytest.raises(PoolError, match="new has no pool yet"):
            KVCachePool.connect(pool.unix, new.unix)


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_pool_of_another_model_at_an_old_address_is_an_error_and_said_once(
    pools: Pools, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    pool = pools.start()
    with pool.client(getattr(pool, door)) as client:
        keys = store(client, 1)
        deploy_anew(pool)
        connected(pool.unix, fingerprint="another", layout=LAYOUT).close()
        calls: list[Callable[[], object]] = [
            lambda: client.exists(keys),
            lambda: client.get(keys, buffers(1)),
            lambda: store(client, 1),
            client.stats,
            lambda: list(client.list_blocks()),
            lambda: client.change_replica(keys[0], 1),
        ]
        for call in calls:
            with pytest.raises(MismatchError, match=f"ours is {FINGERPRINT}, theirs is another"):
                call()
    (message,) = errors_logged(caplog)
    assert getattr(pool, door) in message
    assert f"ours is {FINGERPRINT}, theirs is another" in message


def test_others_answer_for_a_pool_that_came_back_with_another_model(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pools.start("first"), pools.start("second")
    with connected(first.unix, second.unix, fingerprint=FINGERPRINT, layout=LAYOUT) as client:
        with second.client() as alone:
            keys = store(alone, 2)
        deploy_anew(first)
        connected(first.unix, fingerprint="another", layout=LAYOUT).close()
        assert_reads(client, keys)
        assert client.exists(store(client, 1)) == [Tier.DRAM]
        assert set(client.stats()) == {"second"}
        second.kill()
        with pytest.raises(MismatchError, match=f"the pool at {first.unix} holds other blocks"):
            client.exists(keys)
    assert len(errors_logged(caplog)) == 1


def test_pool_with_another_key_at_an_old_address_is_an_error_until_the_key_is_back(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pools.start()
    with pool.client(pool.tcp) as client:
        keys = store(client, 2)
        pool.kill()
        pool.cluster_key = ClusterKey.generate()
        pool.start()
        wait_until_listening(pool.tcp)
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"the pool at {pool.tcp} has another cluster key than"):
                client.exists(keys)
        pool.kill()
        pool.cluster_key = CLUSTER_KEY
        pool.start()
        wait_until_listening(pool.tcp)
        assert_reads(client, keys)
    (message,) = errors_logged(caplog)
    assert f"the pool at {pool.tcp} is not used" in message


def test_others_answer_for_a_pool_that_came_back_with_another_key(pools: Pools) -> None:
    first, second = pools.start("first"), pools.start("second")
    with connected(first.tcp, second.unix, key_file=first.key_file) as client, second.client() as alone:
        keys = store(alone, 2)
        first.kill()
        first.cluster_key = ClusterKey.generate()
        first.start()
        wait_until_listening(first.tcp)
        assert_reads(client, keys)
        assert client.exists(store(client, 1)) == [Tier.DRAM]
        assert set(client.stats()) == {"second"}


# -- in the middle of a put -------------------------------------------------------------------------

KILLED_WHILE_WRITING = """
import os, signal, sys
from kvstore.client import mapped
from kvstore.client.client import KVCachePool

def half(source, target, layer_bytes):
    target[: len(target) // 2] = source[: len(target) // 2]
    os.kill(os.getpid(), signal.SIGKILL)

mapped.copy_layers = half
client = KVCachePool.connect(sys.argv[1])
client.put([b"k" * 16], [b"x" * client.layout.block_bytes])
"""


def test_client_killed_in_the_middle_of_a_put_leaves_nothing(pools: Pools) -> None:
    pool = pools.start()
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, pool.unix]
    killed = subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    with pool.client() as client:
        assert client.exists([b"k" * 16]) == [None]
        until(client, nothing_reserved)
        assert list(client.list_blocks()) == []


def test_put_survives_a_restart_of_the_pool_and_leaves_no_page_behind(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.start()
    copy_layers, num_copies = mapped.copy_layers, 0

    def restart_once(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 2:  # of three blocks
            pool.kill()
            pool.start()
            with connected(pool.unix) as other:
                (stats,) = other.stats(check_integrity=True).values()
                assert stats.num_quarantined == 3  # they may still be written, as happens here
        return copy_layers(source, target, layer_bytes)

    with pool.client() as client:
        monkeypatch.setattr(mapped, "copy_layers", restart_once)
        keys = store(client, 3)
        assert num_copies == 6
        assert_reads(client, keys)
        assert until(client, nothing_reserved).num_sealed == 3


def test_pages_of_threads_that_gave_up_are_free_after_the_next_call(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.start()
    copy_layers = mapped.copy_layers
    writing, go_on = threading.Barrier(4), threading.Event()

    def wait(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
        writing.wait(DEADLINE_S)
        assert go_on.wait(DEADLINE_S)
        return copy_layers(source, target, layer_bytes)

    def put() -> None:
        with pytest.raises(PoolError, match="no pool answers"):
            store(client, 1)

    with pool.client() as client:
        monkeypatch.setattr(mapped, "copy_layers", wait)
        threads = [threading.Thread(target=put) for _ in range(3)]
        for thread in threads:
            thread.start()
        writing.wait(DEADLINE_S)
        pool.kill()
        go_on.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        pool.start()
        pool.ready()
        assert client.exists(keys_of(1)) == [None]
        assert until(client, nothing_reserved).num_sealed == 0


def test_close_waits_for_nobody_and_disturbs_nobody(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.start()
    copy_layers = mapped.copy_layers
    writing, go_on = threading.Event(), threading.Event()

    def wait(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
        writing.set()
        assert go_on.wait(DEADLINE_S)
        return copy_layers(source, target, layer_bytes)

    num_open = num_sockets()
    client = pool.client()
    keys = keys_of(1)
    monkeypatch.setattr(mapped, "copy_layers", wait)
    thread = threading.Thread(target=client.put, args=(keys, [block_of(keys[0])]))
    thread.start()
    assert writing.wait(DEADLINE_S)
    client.close()
    with pool.client() as other:
        (stats,) = other.stats().values()
        assert stats.num_reserved == 1  # the page is still the thread's
        go_on.set()
        thread.join(DEADLINE_S)
        monkeypatch.undo()
        assert_reads(other, keys)
        until(other, nothing_reserved)
    assert num_sockets() == num_open


def num_sockets() -> int:
    """Open in this process."""
    return sum(is_socket(Path("/proc/self/fd") / name) for name in os.listdir("/proc/self/fd"))


def is_socket(path: Path) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except FileNotFoundError:  # that of the directory itself
        return False


def test_connections_and_descriptors_are_given_back(pools: Pools) -> None:
    pool: Pool = pools.start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for address in (pool.unix, pool.tcp):
            with pool.client(address) as client:
                store(client, 2)
    assert len(os.listdir("/proc/self/fd")) == before


KILLED_WITH_A_CHILD = """
import os, signal, sys, time
from kvstore.client.client import KVCachePool

client = KVCachePool.connect(sys.argv[1])
client.put([b"k" * 16], [bytes(client.layout.block_bytes)])
lease = client.lease([b"k" * 16])
child = os.fork()
if child == 0:
    lease.end()
    client.close()
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forked_child_neither_ends_nor_keeps_what_its_parent_has_leased(pools: Pools) -> None:
    pool = pools.start()
    command = [sys.executable, "-c", KILLED_WITH_A_CHILD, pool.unix]
    parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pool.client() as client:
            assert until(client, lambda stats: stats.num_sealed == 1).num_leases == 1
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.wait(DEADLINE_S) == -signal.SIGKILL
            until(client, nothing_reserved)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()
