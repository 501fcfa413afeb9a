"""Where context caches are pinned, as instances hold, lose and regain their blocks."""

import pytest

from conductor.effects import Effect
from conductor.index.prefix_index import PrefixIndex
from conductor.replication.contexts import PIN_S, RENEW_S, Contexts
from conductor.settings import PolicySettings
from conductor.view.instances import Instance, Instances
from mooncake.messages.block_orders import Pin, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.kv_events import KVRemoved, KVStored
from mooncake.messages.pools import Capacity, Tier
from mooncake.messages.workers import Register, Role

KEYS = [bytes(15) + bytes([number]) for number in range(6)]
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


class Cluster:
    """`p0` and `p1` prefill, `d0` decodes."""

    def __init__(self) -> None:
        self.prefixes, self.instances = PrefixIndex(), Instances(PolicySettings())
        self.contexts = Contexts(self.prefixes, self.instances)
        for name, role in (("d0", Role.DECODE), ("p0", Role.PREFILL), ("p1", Role.PREFILL)):
            self.add(name, role)

    def add(self, name: str, role: Role) -> None:
        registration = Register(0, name, 1, role, "", LAYOUT, (), Capacity(9, 9, 1), "")
        self.prefixes.add_instance(name, [name])
        self.instances.add(Instance(registration, name.encode(), 0.0))

    def lose(self, name: str) -> None:
        self.prefixes.remove_instance(name)
        self.instances.remove(name, 0.0)

    def store(self, name: str, keys: list[bytes]) -> None:
        self.prefixes.apply(name, [KVStored(Tier.DRAM, keys)])

    def evict(self, name: str, keys: list[bytes]) -> None:
        self.prefixes.apply(name, [KVRemoved(Tier.DRAM, keys)])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def said(effects: list[Effect]) -> list[tuple[str, object]]:
    return [(effect.peer.decode(), effect.message) for effect in effects]


def test_it_is_pinned_where_it_is_used_and_renewed_until_it_ends(cluster: Cluster) -> None:
    cluster.store("d0", KEYS[:3])
    cluster.store("p0", KEYS[:3])
    ttl_s = PIN_S + 1.5 * RENEW_S
    contexts = cluster.contexts
    assert said(contexts.keep("c", KEYS[:3], ttl_s, 100.0)) == [("p0", Pin(KEYS[:3], PIN_S))]
    assert contexts.tick(100.0 + RENEW_S - 1) == []
    assert said(contexts.tick(100.0 + RENEW_S)) == [("p0", Pin(KEYS[:3], PIN_S))]
    assert said(contexts.tick(100.0 + ttl_s - 10)) == [("p0", Pin(KEYS[:3], 10.0))]
    assert said(contexts.tick(100.0 + ttl_s)) == [("p0", Unpin(KEYS[:3]))]
    assert contexts.tick(1000.0) == []


def test_blocks_that_are_not_known_yet_are_pinned_when_they_are(cluster: Cluster) -> None:
    contexts = cluster.contexts
    assert contexts.keep("c", KEYS[:3], 1000.0, 0.0) == []
    assert (contexts.num_blocks, contexts.num_pinned) == (3, 0)
    cluster.store("p1", KEYS[:2])
    assert said(contexts.tick(0.5)) == [("p1", Pin(KEYS[:2], PIN_S))]
    assert contexts.tick(1.0) == [], "nothing has changed"
    cluster.store("p1", KEYS[2:3])
    assert said(contexts.tick(1.5)) == [("p1", Pin(KEYS[:3], PIN_S))]
    assert contexts.num_pinned == 3


def test_when_its_holder_is_lost_it_is_pinned_where_it_is_computed_again(cluster: Cluster) -> None:
    contexts = cluster.contexts
    cluster.store("p0", KEYS[:3])
    contexts.keep("c", KEYS[:3], 1000.0, 0.0)
    cluster.lose("p0")
    assert contexts.tick(0.5) == []
    assert contexts.num_pinned == 0
    cluster.add("p0", Role.PREFILL)  # its next life holds nothing
    assert contexts.tick(1.0) == []
    cluster.store("p1", KEYS[:3])
    assert said(contexts.tick(1.5)) == [("p1", Pin(KEYS[:3], PIN_S))]


def test_evicted_blocks_are_pinned_on_another_holder(cluster: Cluster) -> None:
    contexts = cluster.contexts
    cluster.store("p0", KEYS[:3])
    contexts.keep("c", KEYS[:3], 1000.0, 0.0)
    cluster.evict("p0", KEYS[2:3])
    cluster.store("p1", KEYS[:3])
    assert said(contexts.tick(RENEW_S)) == [("p0", Unpin(KEYS[:3])), ("p1", Pin(KEYS[:3], PIN_S))]


def test_what_another_cache_needs_stays_pinned(cluster: Cluster) -> None:
    contexts = cluster.contexts
    cluster.store("p0", KEYS)
    contexts.keep("long", KEYS, 1000.0, 0.0)
    contexts.keep("short", KEYS[:3], 1000.0, 0.0)
    assert said(contexts.drop("long")) == [("p0", Unpin(KEYS[3:]))]
    assert said(contexts.drop("short")) == [("p0", Unpin(KEYS[:3]))]
    assert contexts.drop("short") == []


def test_a_longer_life_is_told_at_once(cluster: Cluster) -> None:
    contexts = cluster.contexts
    cluster.store("p0", KEYS)
    assert said(contexts.keep("c", KEYS, 5.0, 0.0)) == [("p0", Pin(KEYS, 5.0))]
    assert said(contexts.keep("c", KEYS, 30.0, 4.0)) == [("p0", Pin(KEYS, 30.0))]
    assert contexts.tick(5.0) == []
    assert said(contexts.tick(34.0)) == [("p0", Unpin(KEYS))]
