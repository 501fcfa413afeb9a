"""Copies of hot prefixes: when they are ordered, from whom, how many at a time, and when they are dropped."""

from collections.abc import Sequence

import pytest

from conductor.replication.copies import AGAIN_S, FETCH_S, MOST_COPIES, Replication
from conductor.replication.heat import HALF_LIFE_S
from conductor.settings import ReplicationSettings
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.block_orders import DropCopies, Replicate
from mooncake.messages.blocks import KVLayout
from mooncake.messages.kv_events import KVRemoved, KVStored
from mooncake.messages.pools import Capacity, MessengerAddress, PoolShard, Tier
from mooncake.messages.workers import Register, Role
from tests.conductor.replication.test_heat import keys_of

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
PERIOD_S = 5.0
Order = tuple[str, str, int]


class Cluster:
    """`p0`, `p1`, ... prefill, `d0` decodes. A round goes by with `round`."""

    def __init__(self, num_prefill: int = 2, uses: float = 4, blocks: int = 1000, pages: int = 1000) -> None:
        self.view, self._pages = ClusterView(), pages
        self.now_s = 100.0
        self._instances: dict[str, Instance] = {}
        for number in range(num_prefill):
            self.add(f"p{number}", Role.PREFILL)
        self.add("d0", Role.DECODE)
        settings = ReplicationSettings(PERIOD_S, uses, blocks * LAYOUT.block_bytes)
        self.replication = Replication(self.view, settings)
        assert self.replication.tick(self.now_s) == []

    def add(self, name: str, role: Role = Role.PREFILL) -> None:
        shard = PoolShard(MessengerAddress(name, 1, "host", "/path", ()), LAYOUT)
        capacity = Capacity(self._pages, self._pages, 32)
        registration = Register(0, name, 1, role, "", LAYOUT, (shard,), capacity, "")
        self._instances[name] = Instance(registration, name.encode(), self.now_s)
        self.view.add(self._instances[name], self.now_s)

    def lose(self, name: str) -> None:
        self.view.remove(self._instances.pop(name))

    def store(self, name: str, keys: Sequence[bytes], tier: Tier = Tier.DRAM) -> None:
        self.view.prefixes.apply(name, [KVStored(tier, list(keys))])

    def evict(self, name: str, keys: Sequence[bytes]) -> None:
        self.view.prefixes.apply(name, [KVRemoved(Tier.DRAM, list(keys))])

    def ask(self, keys: Sequence[bytes], times: int) -> None:
        for _ in range(times):
            self.replication.note(keys)

    def round(self, seconds: float = PERIOD_S) -> list[Order]:
        """The fetches and drops that were ordered, as text."""
        self.now_s += seconds
        orders: list[Order] = []
        for effect in self.replication.tick(self.now_s):
            match effect.message:
                case Replicate(keys, shards, timeout_s):
                    assert timeout_s == FETCH_S
                    orders.append((effect.peer.decode(), shards[0].messenger.instance, len(keys)))
                case DropCopies(keys):
                    self.dropped = keys
                    orders.append((effect.peer.decode(), "drop", len(keys)))
        return orders

    def copied(self, keys: Sequence[bytes], to: str = "p1") -> None:
        """Let a copy that was ordered come."""
        self.ask(keys, 5)
        assert self.round() == [(to, "p0", len(keys))]
        self.store(to, keys)
        assert self.round() == []
        assert self.replication.num_copies == 1


def test_what_is_asked_for_often_gets_a_second_copy_once() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.ask(keys, 4)
    assert cluster.round() == [], "a copy more for more than 4 uses"
    cluster.ask(keys, 2)
    assert cluster.round(PERIOD_S - 1) == [], "not before the period is over"
    assert cluster.round(1) == [("p1", "p0", 10)]
    cluster.ask(keys, 50)
    assert cluster.round() == [], "it is under way"
    cluster.store("p1", keys)
    cluster.ask(keys, 50)
    assert cluster.round() == [], "and there"
    assert (cluster.replication.num_copies, cluster.replication.num_ordered_blocks) == (1, 10)


def test_only_the_blocks_that_are_hot_and_lacking_are_copied() -> None:
    cluster, shared = Cluster(), keys_of("shared", 6)
    for number in range(5):
        prompt = [*shared, *keys_of(f"own {number}", 4)]
        cluster.store("p0", prompt)
        cluster.ask(prompt, 1)
    cluster.store("p1", shared[:2])
    assert cluster.round() == [("p1", "p0", 6)]
    assert cluster.replication.num_ordered_blocks == 4


def test_the_hotter_a_prefix_the_more_copies() -> None:
    cluster, keys = Cluster(num_prefill=5), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.ask(keys[:3], 4)
    cluster.ask(keys, 9)
    hottest = [("p1", "p0", 3), ("p2", "p0", 3), ("p3", "p0", 3)]
    assert cluster.round() == [*hottest, ("p1", "p0", 10), ("p2", "p0", 10)]
    assert cluster.replication.num_ordered_blocks == 3 + 10 + 10


@pytest.mark.parametrize("holder", ["p1", "d0"])
def test_blocks_come_from_the_holder_of_all_with_the_fewest_bytes_ahead(holder: str) -> None:
    cluster, keys = Cluster(num_prefill=3), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.store(holder, keys)
    slot = cluster.view.slot_of("p0")
    assert slot is not None
    cluster.view.transfers.ordered_bytes[slot] = 1e9
    cluster.ask(keys, 9)
    sources = {source for _, source, _ in cluster.round()}
    assert sources == {holder}


def test_a_copy_goes_to_the_shortest_queue_that_has_room() -> None:
    cluster, keys = Cluster(num_prefill=4), keys_of("a", 10)
    cluster.store("p0", keys)
    loads = cluster.view.loads
    slots = [cluster.view.slot_of(name) for name in ("p1", "p2", "p3")]
    assert None not in slots
    loads.assign_prefill(slots[0], "r", 5.0)  # type: ignore[arg-type]
    loads.set_room(slots[1], 19)  # type: ignore[arg-type]
    cluster.ask(keys, 5)
    assert cluster.round() == [("p3", "p0", 10)]


def test_no_more_than_so_many_bytes_are_under_way() -> None:
    cluster, hot, warm = Cluster(blocks=15), keys_of("hot", 10), keys_of("warm", 10)
    for keys, times in ((warm, 5), (hot, 8)):
        cluster.store("p0", keys)
        cluster.ask(keys, times)
    assert cluster.round() == [("p1", "p0", 10), ("p1", "p0", 5)], "the hottest first, then what fits"
    cluster.ask(warm, 5)
    assert cluster.round() == [], "they have not come yet"
    cluster.store("p1", hot)
    cluster.store("p1", warm[:5])
    cluster.ask(warm, 5)
    assert cluster.round() == [("p1", "p0", 10)]
    assert cluster.replication.num_ordered_blocks == 20
    cluster.store("p1", warm)
    assert cluster.round() == []
    assert cluster.replication.num_copies == 2, "the parts are one"
    cluster.round(5 * HALF_LIFE_S)
    assert cluster.replication.num_dropped_blocks == 20


def test_a_surplus_copy_is_dropped_at_half_the_uses_that_it_was_made_for() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.copied(keys)
    assert cluster.round(HALF_LIFE_S) == [], "2.4 uses"
    assert cluster.round(HALF_LIFE_S / 2) == [("p1", "drop", 10)]
    assert cluster.replication.num_dropped_blocks == 10
    assert cluster.round() == []


def test_blocks_that_are_hot_stay_when_those_behind_them_are_dropped() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.copied(keys)
    cluster.ask(keys[:4], 10)
    cluster.round(HALF_LIFE_S)
    cluster.ask(keys[:4], 10)
    assert cluster.round(HALF_LIFE_S) == [("p1", "drop", 6)]
    assert cluster.dropped == keys[4:]
    cluster.evict("p1", keys[4:])
    assert cluster.round() == []
    assert cluster.round(4 * HALF_LIFE_S) == [("p1", "drop", 4)]


def test_what_decode_instances_hold_makes_no_copy_surplus() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.add("d1", Role.DECODE)
    for holder in ("p0", "d0", "d1"):
        cluster.store(holder, keys)
    cluster.copied(keys)
    assert cluster.round(HALF_LIFE_S) == [], "2.4 uses"
    assert cluster.round(HALF_LIFE_S / 2) == [("p1", "drop", 10)]


def test_the_last_copy_is_not_dropped() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.copied(keys)
    cluster.lose("p0")
    assert cluster.round(5 * HALF_LIFE_S) == []


def test_of_several_surplus_copies_one_holder_is_left() -> None:
    cluster, keys = Cluster(num_prefill=3), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.ask(keys, 9)
    assert cluster.round() == [("p1", "p0", 10), ("p2", "p0", 10)]
    cluster.store("p1", keys)
    cluster.store("p2", keys)
    cluster.lose("p0")
    assert cluster.round(5 * HALF_LIFE_S) == [("p1", "drop", 10)]


def test_a_prefix_around_the_limit_does_not_come_and_go() -> None:
    """Between half of the uses for a copy and all of them nothing moves."""
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.copied(keys)
    for _ in range(100):
        cluster.ask(keys, 1)  # every 15 s: some 5.3 uses just after it, 4.4 before the next
        assert [cluster.round(), cluster.round(), cluster.round()] == [[], [], []]
    cluster.evict("p1", keys)
    for _ in range(int(AGAIN_S / PERIOD_S)):
        cluster.ask(keys, 2)
        assert cluster.round() == [], "there was no room for it"
    cluster.ask(keys, 2)
    assert cluster.round() == [("p1", "p0", 10)]


def test_a_copy_that_does_not_come_holds_nothing_up_for_long() -> None:
    cluster, keys, others = Cluster(blocks=10), keys_of("a", 10), keys_of("b", 10)
    cluster.store("p0", keys)
    cluster.store("p0", others)
    cluster.ask(keys, 5)
    assert cluster.round() == [("p1", "p0", 10)]
    cluster.ask(others, 20)
    assert cluster.round() == []
    cluster.ask(others, 20)
    assert cluster.round(FETCH_S) == [("p1", "p0", 10)]


def test_what_a_lost_instance_was_told_is_told_again_when_it_is_back() -> None:
    cluster, keys = Cluster(), keys_of("a", 10)
    cluster.store("p0", keys)
    cluster.copied(keys)
    cluster.lose("p1")
    cluster.ask(keys, 5)
    assert cluster.round() == []
    cluster.add("p1")
    cluster.ask(keys, 5)
    assert cluster.round() == [("p1", "p0", 10)]


def test_so_many_copies_are_followed() -> None:
    cluster = Cluster(uses=1, blocks=10 * MOST_COPIES)
    for first in range(0, MOST_COPIES + 40, 40):
        for number in range(first, first + 40):
            keys = keys_of(f"prompt {number}", 2)
            cluster.store("p0", keys)
            cluster.ask(keys, 3)
        assert len(cluster.round()) == 40
        for number in range(first, first + 40):
            cluster.store("p1", keys_of(f"prompt {number}", 2))
    cluster.round()
    assert cluster.replication.num_copies == MOST_COPIES
