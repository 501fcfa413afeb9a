"""Copies of blocks in several pools."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import replicas
from kvstore.client.backends import Backend
from kvstore.client.client import KVCachePool
from kvstore.client.connections import PoolURL
from mooncake.errors import PoolError
from mooncake.messages.pools import MessengerAddress
from tests.kvstore.nodes import FINGERPRINT, LAYOUT
from tests.kvstore.pools import Pool, Pools, block_of, buffers, connected, keys_of, nothing_reserved, until

pytestmark = pytest.mark.cluster


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[list[Pool]]:
    with Pools(tmp_path) as pools:
        yield [pools.start(name, 8) for name in ("a", "b", "c")]


def client_of(*addresses: str, key_file: Path | None = None) -> KVCachePool:
    return connected(*addresses, fingerprint=FINGERPRINT, layout=LAYOUT, key_file=key_file)


def test_copies_are_made_and_removed_until_there_are_so_many(pools: list[Pool]) -> None:
    a, b, c = pools
    (key,) = keys_of(1)
    with client_of(a.unix, b.tcp, c.unix, key_file=a.key_file) as client:
        client.put([key], [block_of(key)])
        for num_replicas, instances in ((1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"]), (2, ["a", "b"])):
            assert client.change_replica(key, num_replicas) == (instances, 1)
            assert {instance for instance, _ in client.list_blocks()} == set(instances)
    for pool in (a, b):
        with pool.client() as alone:
            out = buffers(1)
            assert alone.get([key], out) == [True]
            assert out[0] == block_of(key)
            until(alone, nothing_reserved)


def test_what_cannot_be_reached_says_how_many_there_are_and_why(pools: list[Pool]) -> None:
    a, b, c = pools
    first, second = keys_of(2)
    with client_of(a.unix, b.unix, c.unix) as client:
        client.put([first], [block_of(first)])
        with pytest.raises(PoolError, match="4 copies wanted, there are 1: 3 pools are connected"):
            client.change_replica(first, 4)
        with pytest.raises(PoolError, match=f"no copy of {second.hex()} in the 3 pools"):
            client.change_replica(second, 2)
        with pytest.raises(PoolError, match="the least is 1"):
            client.change_replica(first, 0)
        c.kill()
        with pytest.raises(
            PoolError, match="3 copies wanted, there are 1: 2 pools are connected; nobody listens"
        ):
            client.change_replica(first, 3)
        assert client.change_replica(first, 2) == (["a", "b"], 1)


def test_pool_without_room_is_passed_over(pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = pools
    monkeypatch.setattr(replicas, "_ROOM_TIMEOUT_S", 0.05)
    (key,) = keys_of(1)
    with client_of(a.unix, b.unix, c.unix) as client, b.client() as other:
        client.put([key], [block_of(key)])
        others = keys_of(8)
        other.put(others, [block_of(other_key) for other_key in others])
        with other.lease(others):
            assert client.change_replica(key, 2) == (["a", "c"], 1)
            with pytest.raises(PoolError, match="3 copies wanted, there are 2: b: no room for 1 blocks"):
                client.change_replica(key, 3)
        assert client.change_replica(key, 3) == (["a", "c", "b"], 1)


def test_damaged_copy_is_not_copied(pools: list[Pool]) -> None:
    a, b, _ = pools
    (key,) = keys_of(1)
    with client_of(a.unix, b.unix) as client:
        client.put([key], [block_of(key)])
        a.damage(key, layer=1)
        with pytest.raises(PoolError, match="2 copies wanted, there are 1: b: "):
            client.change_replica(key, 2)
        assert client.get([key], buffers(1)) == [False]
        assert client.exists([key]) == [None]


def test_the_same_pool_by_two_doors_holds_one_copy(pools: list[Pool]) -> None:
    a, b, _ = pools
    (key,) = keys_of(1)
    with client_of(a.unix, a.tcp, key_file=a.key_file) as client:
        client.put([key], [block_of(key)])
        with pytest.raises(PoolError, match="2 copies wanted, there are 1: 1 pools are connected"):
            client.change_replica(key, 2)
    with client_of(a.unix, a.tcp, b.unix, key_file=a.key_file) as client:
        assert client.change_replica(key, 2) == (["a", "b"], 1)


def test_copies_go_to_other_hosts_first_and_leave_crowded_ones_first() -> None:
    backend = Backend(PoolURL.parse("unix:/nowhere"), None, None, None, 1)

    def pool(name: str, host: str) -> replicas._Pool:
        return replicas._Pool(backend, MessengerAddress(name, 1, host, "", (), ("", "")), False)

    a, b, c, d = pool("a", "here"), pool("b", "here"), pool("c", "there"), pool("d", "there")
    assert replicas.least_used_host([b, c, d], [a]) is c
    assert replicas.least_used_host([b, d], [a, c]) is b
    assert replicas.most_used_host([a, b, c]) is b
    assert replicas.most_used_host([a, c, d]) is d
    assert replicas.most_used_host([a, c]) is c
