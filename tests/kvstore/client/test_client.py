"""Programs that use the pool through its library, with real messengers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import mapped
from kvstore.client.client import KVCachePool
from kvstore.client.connections import PoolURL
from kvstore.protocol.calls import Commit, Connect
from mooncake.errors import ConfigError, MismatchError, PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Tier
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S
from tests.examples import num_examples
from tests.kvstore.nodes import FINGERPRINT, LAYOUT, ROOT
from tests.kvstore.pools import (
    Pool,
    Pools,
    block_of,
    buffers,
    key_file_in,
    keys_of,
    nothing_reserved,
    until,
    wait_until_listening,
)

NUM_PAGES = 16


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    with Pools(tmp_path) as pools:
        yield pools


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool for tests that leave it running."""
    with Pools(tmp_path_factory.mktemp("shared")) as pools:
        yield pools.start("shared", NUM_PAGES)


@pytest.fixture(params=["unix", "tcp"])
def client(shared: Pool, request: pytest.FixtureRequest) -> Iterator[KVCachePool]:
    """A client of the shared pool, which is empty."""
    with shared.client(getattr(shared, request.param)) as client:
        client.clear()
        yield client


def store(client: KVCachePool, num_blocks: int) -> list[BlockKey]:
    keys = keys_of(num_blocks)
    client.put(keys, [block_of(key) for key in keys])
    return keys


# -- blocks -----------------------------------------------------------------------------------------


def test_stored_blocks_come_back_as_they_were(client: KVCachePool) -> None:
    keys = store(client, 5)
    out = buffers(5)
    assert client.get(keys, out) == [True] * 5
    assert out == [block_of(key) for key in keys]
    assert (client.fingerprint, client.layout) == (FINGERPRINT, LAYOUT)


def test_what_is_missing_is_false_and_the_rest_is_there(client: KVCachePool) -> None:
    first, third = store(client, 2)
    out = buffers(3)
    keys = [first, *keys_of(1), third]
    assert client.get(keys, out) == [True, False, True]
    assert (out[0], out[2]) == (block_of(first), block_of(third))
    assert client.exists(keys) == [Tier.DRAM, None, Tier.DRAM]
    assert client.prefix_len(keys) == 1
    assert client.prefix_len([first, third]) == 2
    assert client.prefix_len([]) == 0


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(3, 4), range(4)])
def test_some_layers_of_a_block_can_be_read(client: KVCachePool, layers: range) -> None:
    keys = store(client, 2)
    size = len(layers) * LAYOUT.layer_bytes
    out = buffers(2, size)
    assert client.get(keys, out, layers) == [True, True]
    start = layers.start * LAYOUT.layer_bytes
    assert out == [block_of(key)[start : start + size] for key in keys]


@pytest.mark.parametrize("layers", [range(0), range(5), range(-1, 2), range(0, 4, 2)])
def test_layers_that_do_not_exist_are_refused(client: KVCachePool, layers: range) -> None:
    with pytest.raises(PoolError, match=r"consecutive layers within range\(0, 4\) can be read, not range"):
        client.get(keys_of(1), buffers(1), layers)


def test_block_that_is_there_is_not_written_again(client: KVCachePool) -> None:
    (key,) = store(client, 1)
    client.put([key], [bytes(LAYOUT.block_bytes)])
    out = buffers(1)
    assert client.get([key], out) == [True]
    assert out[0] == block_of(key)


def test_key_may_come_twice_in_one_call(client: KVCachePool) -> None:
    (key,) = keys_of(1)
    client.put([key, key], [block_of(key)] * 2)
    out = buffers(3)
    assert client.get([key] * 3, out) == [True] * 3
    assert out == [block_of(key)] * 3
    assert client.exists([key, key]) == [Tier.DRAM] * 2
    assert client.remove([key, key]) == 1


def test_arrays_are_buffers_too(client: KVCachePool) -> None:
    shape = (LAYOUT.num_layers, LAYOUT.num_kv_heads, 2, LAYOUT.block_size, LAYOUT.head_dim)
    block = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)
    out = np.zeros(shape, np.uint16)
    (key,) = keys_of(1)
    client.put([key], [block])
    assert client.get([key], [out]) == [True]
    assert np.array_equal(block, out)


def test_buffers_of_a_wrong_size_or_kind_are_refused_with_both_sizes(client: KVCachePool) -> None:
    size = LAYOUT.block_bytes
    keys = keys_of(1)
    with pytest.raises(PoolError, match=f"{size + 1} bytes is larger than a page: .* take {size} bytes"):
        client.put(keys, [bytes(size + 1)])
    with pytest.raises(PoolError, match=f"{size - 1} bytes is shorter than a block: .* take {size} bytes"):
        client.put(keys, [bytes(size - 1)])
    with pytest.raises(PoolError, match=f"{size} bytes is larger .* 1 layers .* {LAYOUT.layer_bytes} bytes"):
        client.get(keys, buffers(1), range(1))
    with pytest.raises(PoolError, match="read-only"):
        client.get(keys, [bytes(size)])
    with pytest.raises(PoolError, match="one piece"):
        client.put(keys, [np.zeros((size, 2), np.uint8)[:, 0]])
    with pytest.raises(PoolError, match="1 keys came with 2 blocks"):
        client.put(keys, [bytes(size)] * 2)
    with pytest.raises(PoolError, match="a key has 16 bytes, this one 15"):
        client.exists([bytes(15)])
    assert client.exists(keys) == [None]


def test_more_blocks_than_the_pool_holds_at_once_are_stored_one_part_after_another(
    client: KVCachePool,
) -> None:
    keys = store(client, 3 * NUM_PAGES)
    assert client.exists(keys[-1:]) == [Tier.DRAM]
    assert client.prefix_len(keys) == 0  # evicted again, oldest first
    out = buffers(len(keys))
    is_there = client.get(keys, out)
    assert sum(is_there) >= NUM_PAGES // 2
    assert all(
        buffer == block_of(key) for key, buffer, there in zip(keys, out, is_there, strict=True) if there
    )


def test_more_keys_than_fit_into_a_message_are_asked_for_in_parts(client: KVCachePool) -> None:
    (key,) = store(client, 1)
    keys = [*keys_of(10_000), key]
    tiers = client.exists(keys)
    assert tiers.count(None) == 10_000
    assert tiers[-1] is Tier.DRAM
    assert client.remove(keys) == 1


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_large_blocks_travel_in_pieces(pools: Pools, door: str) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=3, head_dim=128, block_size=300, dtype="bfloat16")
    assert layout.layer_bytes > 256 * 1024  # more than a piece, and no multiple of one
    pool = pools.start("large", num_pages=12, layout=layout)
    with pool.client(getattr(pool, door)) as client:
        keys = keys_of(6)
        blocks = [block_of(key, layout) for key in keys]
        client.put(keys[::2], blocks[::2])
        client.put(keys, blocks)  # of which half is there already
        out = buffers(6, layout.block_bytes)
        assert client.get(keys, out) == [True] * 6
        assert out == blocks
        out = buffers(6, 2 * layout.layer_bytes)
        assert client.get(keys, out, range(1, 3)) == [True] * 6
        assert out == [block[layout.layer_bytes :] for block in blocks]
        pool.damage(keys[0], layer=1)
        assert client.get(keys[:1], buffers(1, layout.layer_bytes), range(2, 3)) == [True]
        assert client.get(keys[:2], buffers(2, layout.block_bytes)) == [False, True]


@settings(max_examples=num_examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "layers", "exists", "remove"]),
            st.lists(st.integers(0, NUM_PAGES - 1), max_size=6),
        ),
        max_size=12,
    )
)
def test_pool_is_a_dictionary_of_blocks(client: KVCachePool, steps: list[tuple[str, list[int]]]) -> None:
    client.clear()
    stored: set[BlockKey] = set()
    for step, names in steps:
        keys = [name.to_bytes(16, "little") for name in names]
        out = buffers(len(keys))
        match step:
            case "put":
                client.put(keys, [block_of(key) for key in keys])
                stored.update(keys)
            case "get":
                assert client.get(keys, out) == [key in stored for key in keys]
                assert all(
                    block == block_of(key) for key, block in zip(keys, out, strict=True) if key in stored
                )
            case "layers":
                out = buffers(len(keys), LAYOUT.layer_bytes)
                assert client.get(keys, out, range(2, 3)) == [key in stored for key in keys]
            case "exists":
                assert [tier is not None for tier in client.exists(keys)] == [key in stored for key in keys]
            case _:
                assert client.remove(keys) == len(stored & set(keys))
                stored.difference_update(keys)
    assert {block.key for _, block in client.list_blocks()} == stored


# -- damage -----------------------------------------------------------------------------------------


def test_damaged_block_is_dropped_and_never_returned(client: KVCachePool, shared: Pool) -> None:
    good, bad = store(client, 2)
    shared.damage(bad, layer=2)
    out = buffers(1, LAYOUT.layer_bytes)
    assert client.get([bad], out, range(1)) == [True]  # that layer is as it was
    assert client.get([good, bad], buffers(2)) == [True, False]
    assert client.exists([good, bad]) == [Tier.DRAM, None]
    until(client, nothing_reserved)


def test_verify_finds_and_drops_what_is_damaged(client: KVCachePool, shared: Pool) -> None:
    keys = store(client, 4)
    shared.damage(keys[1], layer=3)
    assert client.verify([*keys, *keys_of(1)]) == (3, [keys[1]])
    assert client.verify(keys) == (3, [])


@pytest.mark.parametrize("half_written", [True, False])
def test_block_that_was_replaced_while_it_was_copied_is_not_taken_for_the_old_one(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, half_written: bool
) -> None:
    pool = pools.start(num_pages=1)
    url = PoolURL.parse(pool.unix)
    copy_layers = mapped.copy_layers

    def be_slow(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
        """The lease ends, and another client writes another block to the page."""
        monkeypatch.undo()
        with pool.client() as other:
            until(other, nothing_reserved)
            if not half_written:
                other.put(keys_of(1), [bytes(LAYOUT.block_bytes)])
                return copy_layers(source, target, layer_bytes)
        reservation = writer.reserve(keys_of(1), timeout_s=0)
        first = writer.mapping.view(reservation.blocks[0].page, range(1))
        checksums = copy_layers(memoryview(bytes(len(first))), first, len(first))
        writer.notify(Commit(reservation.reservation_id, 0, 1, [reservation.blocks[0].page], checksums))
        writer.report_damaged(keys_of(1))  # answered behind the commit
        return copy_layers(source, target, layer_bytes)

    with pool.client() as client:
        keys = store(client, 1)
        writer = mapped.MappedConnection.open(url, Connect(0, FINGERPRINT, LAYOUT, 1 << 20), 10, None)
        monkeypatch.setattr(mapped, "_COPY_LEASE_S", 0.01)
        monkeypatch.setattr(mapped, "copy_layers", be_slow)
        out = buffers(1, LAYOUT.layer_bytes)
        assert client.get(keys, out, range(1)) == [False]
        assert out[0] == bytes(LAYOUT.layer_bytes)  # it was the new block's
        writer.close()


# -- room -------------------------------------------------------------------------------------------


def test_put_into_a_full_pool_waits_for_room(client: KVCachePool, shared: Pool) -> None:
    with shared.client() as other:
        held = store(other, NUM_PAGES)
        lease = other.lease(held)
        (key,) = keys_of(1)
        with pytest.raises(PoolFullError, match=r"no room for 1 blocks within 0\.05 s: .*16"):
            client.put([key], [block_of(key)], timeout_s=0.05)
        with ThreadPoolExecutor() as threads:
            storing = threads.submit(client.put, [key], [block_of(key)], timeout_s=DEADLINE_S)
            assert client.exists(held) == [Tier.DRAM] * NUM_PAGES  # others are not held up
            assert not storing.done()
            lease.end()
            storing.result()
        assert client.exists([key]) == [Tier.DRAM]
        until(client, nothing_reserved)


def test_pinned_blocks_stay_and_others_go(client: KVCachePool) -> None:
    keys = store(client, 3)
    assert client.pin([*keys[:2], *keys_of(1)], ttl_s=60, hard=True) == 2
    store(client, 2 * NUM_PAGES)
    assert client.exists(keys) == [Tier.DRAM, Tier.DRAM, None]
    with pytest.raises(PoolError, match="at most half"):
        client.pin(store(client, NUM_PAGES - 2), ttl_s=60, hard=True)
    assert client.unpin(keys) == 2
    store(client, 2 * NUM_PAGES)
    assert client.exists(keys) == [None] * 3


def test_removed_blocks_are_gone(client: KVCachePool) -> None:
    keys = store(client, 3)
    assert client.remove(keys[:2]) == 2
    assert client.remove(keys[:2]) == 0
    assert client.exists(keys) == [None, None, Tier.DRAM]
    client.prefetch(keys)  # of what is in DRAM or nowhere: nothing to do
    assert client.clear() == 1
    assert list(client.list_blocks()) == []


def test_statistics_and_list_name_the_instance(client: KVCachePool) -> None:
    keys = store(client, 2)
    stats = client.stats()["shared"]
    assert (stats.num_sealed, stats.block_bytes) == (2, LAYOUT.block_bytes)
    listed = list(client.list_blocks())
    assert {instance for instance, _ in listed} == {"shared"}
    assert {block.key: block.tier for _, block in listed} == dict.fromkeys(keys, Tier.DRAM)


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_blocks_pushed_out_to_ssd_are_read_as_if_they_were_in_dram(pools: Pools, door: str) -> None:
    pool = pools.start(num_ssd_blocks=64)
    with pool.client(getattr(pool, door)) as client:
        keys = store(client, 3 * NUM_PAGES)
        tiers = client.exists(keys)
        assert tiers.count(Tier.SSD) >= 2 * NUM_PAGES
        assert None not in tiers
        assert client.prefix_len(keys) == len(keys)
        out = buffers(len(keys))  # three times what fits into DRAM
        assert client.get(keys, out) == [True] * len(keys)
        assert out == [block_of(key) for key in keys]
        on_ssd = keys[client.exists(keys).index(Tier.SSD)]
        client.prefetch([on_ssd])
        deadline = time.monotonic() + DEADLINE_S
        while client.exists([on_ssd]) != [Tier.DRAM]:
            assert time.monotonic() < deadline
        assert client.pin([on_ssd], ttl_s=60) == 1
        assert client.verify(keys) == (len(keys), [])
        assert client.remove(keys) == len(keys)
        assert list(client.list_blocks()) == []
        until(client, nothing_reserved)


# -- leases -----------------------------------------------------------------------------------------


def test_leased_blocks_are_read_in_place_and_stay(shared: Pool) -> None:
    with shared.client() as client:
        client.clear()
        keys = store(client, 2)
        with client.lease([*keys, *keys_of(1)]) as lease:
            store(client, 2 * NUM_PAGES)
            first, second, third = lease.blocks
            assert (first, second, third) == (block_of(keys[0]), block_of(keys[1]), None)
            assert first is not None
            assert first.readonly
            assert lease.verify() == [True, True, False]
            shared.damage(keys[1], layer=0)
            assert lease.verify() == [True, False, False]
        with pytest.raises(ValueError, match="released memoryview"):
            bytes(first)
        until(client, nothing_reserved)


def test_lease_that_has_run_out_tells_by_verify(shared: Pool) -> None:
    with shared.client() as client:
        client.clear()
        keys = store(client, 2)
        lease = client.lease(keys, ttl_s=0.01)
        array = np.frombuffer(lease.blocks[0] or b"", np.uint8)
        until(client, nothing_reserved)
        store(client, 2 * NUM_PAGES)
        assert lease.verify() == [False, False]
        lease.end()
        lease.end()
        assert len(array) == LAYOUT.block_bytes  # who holds an array may look, at whatever is there now


def test_lease_needs_a_pool_on_this_host(shared: Pool) -> None:
    with shared.client(shared.tcp) as client, pytest.raises(PoolError, match="only from a pool on this host"):
        client.lease(keys_of(1))


# -- who is at the other end ------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_other_blocks_are_refused_with_both_sides_named(shared: Pool, door: str) -> None:
    address = getattr(shared, door)
    with pytest.raises(MismatchError, match=f"ours is another, theirs is {FINGERPRINT}"):
        KVCachePool.connect(address, fingerprint="another", key_file=shared.key_file)
    wider = msgspec.structs.replace(LAYOUT, block_size=32)
    with pytest.raises(MismatchError, match=r"KV layout differs: .*block_size=32.*block_size=16"):
        KVCachePool.connect(address, layout=wider, key_file=shared.key_file)


def test_pools_of_different_models_are_not_used_together(pools: Pools, shared: Pool) -> None:
    wider = msgspec.structs.replace(LAYOUT, block_size=32)
    other = pools.start("other", layout=wider)
    with pytest.raises(MismatchError, match="KV layout"):
        KVCachePool.connect(shared.unix, other.tcp, key_file=shared.key_file)


def test_pool_without_a_layout_takes_that_of_its_first_client(tmp_path: Path) -> None:
    with Pools(tmp_path) as pools:
        pool = Pool(pools.folder, "new", NUM_PAGES, LAYOUT)
        pool.start()
        try:
            wait_until_listening(pool.tcp)
            for address in (pool.unix, pool.tcp):
                with pytest.raises(PoolError, match="has no pool yet"):
                    KVCachePool.connect(address, key_file=pool.key_file)
            with KVCachePool.connect(pool.unix, fingerprint=FINGERPRINT, layout=LAYOUT) as client:
                store(client, 1)
            with KVCachePool.connect(pool.tcp, key_file=pool.key_file) as client:
                assert client.layout == LAYOUT
        finally:
            pool.close()


@pytest.mark.parametrize(
    "address",
    ["unix:", "tcp://host", "tcp://host:99999", "/tmp/x.sock", "http://a:1", "tcp://::1:7000", "tcp://[a]:1"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unix:/path/of\.sock, tcp://host:port or tcp://\[IPv6\]:port, not"
    ):
        KVCachePool.connect(address)


def test_pool_that_is_not_there_fails_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(PoolError, match=r"no pool answers: nobody listens at unix:.*No such file"):
        KVCachePool.connect(f"unix:{tmp_path}/none.sock", timeout_s=DEADLINE_S)
    with pytest.raises(
        PoolError, match=r"no pool answers: cannot connect to tcp://127\.0\.0\.1:1: .*refused"
    ):
        KVCachePool.connect("tcp://127.0.0.1:1", key_file=key_file_in(tmp_path), timeout_s=DEADLINE_S)
    with pytest.raises(ConfigError, match="at least one pool"):
        KVCachePool.connect()
    assert time.monotonic() - started < DEADLINE_S / 2


def test_closed_client_says_so(client: KVCachePool) -> None:
    client.close()
    client.close()
    with pytest.raises(PoolError, match="closed"):
        client.exists(keys_of(1))


def test_forked_child_must_connect_itself(client: KVCachePool) -> None:
    keys = store(client, 1)
    child = os.fork()
    if child == 0:
        try:
            client.exists(keys)
        except PoolError as error:
            os._exit(0 if "connect again in the child" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert client.exists(keys) == [Tier.DRAM]


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan"), 1e9])
def test_timeouts_that_are_none_are_refused(client: KVCachePool, shared: Pool, timeout_s: float) -> None:
    with pytest.raises(PoolError, match=r"a timeout of .* s; it must be 0 to 3600 s"):
        client.put(keys_of(1), buffers(1), timeout_s)
    with pytest.raises(ConfigError, match=r"a timeout of .* s; it must be positive, at most 3600 s"):
        KVCachePool.connect(shared.unix, timeout_s=timeout_s)


def test_pool_on_another_host_needs_a_key_that_only_its_owner_can_read(shared: Pool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{shared.tcp} listens only to .* as key_file="):
        KVCachePool.connect(shared.unix, shared.tcp)
    with pytest.raises(ConfigError, match=r"there is no cluster key at .*none\.key"):
        KVCachePool.connect(shared.tcp, key_file=tmp_path / "none.key")
    key_file = key_file_in(tmp_path)
    key_file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others than its owner may use the cluster key"):
        KVCachePool.connect(shared.tcp, key_file=str(key_file))


def test_pool_on_this_host_needs_no_key(shared: Pool, tmp_path: Path) -> None:
    with KVCachePool.connect(shared.unix, key_file=tmp_path / "none.key") as client:
        assert client.layout == LAYOUT


def test_wrong_key_is_an_error_that_names_the_pool_and_what_to_do(shared: Pool, tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.save(tmp_path / "wrong.key")
    for addresses in ([shared.tcp], [shared.unix, shared.tcp]):
        with pytest.raises(ConfigError, match=f"the pool at {shared.tcp} has another cluster key") as error:
            KVCachePool.connect(*addresses, key_file=tmp_path / "wrong.key")
        assert f"(key id {key.key_id}); give as key_file a copy of the key that" in str(error.value)


# -- several at a time ------------------------------------------------------------------------------


def test_two_clients_see_what_the_other_stores(shared: Pool) -> None:
    with shared.client() as here, shared.client(shared.tcp) as there:
        for writer, reader in ((here, there), (there, here)):
            writer.clear()
            keys = store(writer, 3)
            out = buffers(3)
            assert reader.get(keys, out) == [True] * 3
            assert out == [block_of(key) for key in keys]


def test_threads_share_a_client(client: KVCachePool) -> None:
    keys = keys_of(NUM_PAGES // 2)  # of which all threads store and read all

    def work(seed: int) -> None:
        for step in np.random.default_rng(seed).permutation(4 * len(keys)).tolist():
            key = keys[step % len(keys)]
            if step % 2:
                client.put([key], [block_of(key)])
            out = buffers(1)
            if client.get([key], out) == [True]:
                assert out[0] == block_of(key)
            if step % 7 == 0:
                client.remove([key])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result()
    until(client, nothing_reserved)


# -- the example of the documentation ---------------------------------------------------------------


def test_example_runs(pools: Pools, shared: Pool) -> None:
    other = pools.start("other")
    for addresses in ([shared.unix], [shared.tcp], [shared.unix, other.tcp]):
        key = ["--key-file", str(shared.key_file)] if addresses != [shared.unix] else []
        result = subprocess.run(
            [sys.executable, "docs/examples/kvcache_pool.py", *addresses, *key],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert "stored 3 blocks, in dram" in result.stdout
        assert f"removed {2 + len(addresses)} copies" in result.stdout
