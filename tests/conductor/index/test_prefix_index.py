"""The index against plain sets of keys for each shard and tier, and against events that make no sense."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.index.prefix_index import PrefixIndex
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier
from tests.examples import num_examples

DRAM, SSD, DEVICE = Tier.DRAM, Tier.SSD, Tier.DEVICE
KEYS = [bytes(15) + bytes([number]) for number in range(12)]
CHAINS = [KEYS[:6], KEYS[:3] + KEYS[6:9], KEYS[9:]]
PARTS = {"p0": ("p0",), "p1": ("p1.0", "p1.1"), "d0": ("d0",), "d1": ("d1.0", "d1.1", "d1.2")}
"""The shards of each instance."""


def matched(index: PrefixIndex, keys: Sequence[bytes]) -> dict[str, tuple[int, int]]:
    """The leading blocks of each instance by name, and the number of them in DRAM."""
    match = index.match(keys)
    assert match.num_blocks.dtype == match.num_dram_blocks.dtype == np.int32
    assert len(match.num_blocks) == len(match.num_dram_blocks) == index.num_slots
    assert match.num_best_blocks == match.num_blocks.max(initial=0)
    return {
        name: (int(match.num_blocks[slot]), int(match.num_dram_blocks[slot]))
        for name, slot in index.slots.items()
    }


def matched_own(index: PrefixIndex, keys: Sequence[bytes]) -> dict[str, tuple[int, int]]:
    """The leading blocks that each instance need not compute, and the number of them to read from SSD."""
    match = index.match_own(keys, index.match(keys))
    return {
        name: (match.num_blocks_at(slot), match.num_ssd_blocks_at(slot)) for name, slot in index.slots.items()
    }


def index_of(*names: str) -> PrefixIndex:
    index = PrefixIndex()
    for name in names:
        index.add_instance(name, PARTS[name])
    return index


class Pools(RuleBasedStateMachine):
    """Instances come and go, their shards report anything in any order; checked against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, dict[Tier, set[bytes]]] = {}
        """The keys by shard."""
        self.names: set[str] = set()

    @rule(name=st.sampled_from(sorted(PARTS)))
    def come_or_go(self, name: str) -> None:
        if name in self.names:
            self.names.remove(name)
            self.index.remove_instance(name)
            for shard in PARTS[name]:
                del self.held[shard]
        else:
            self.names.add(name)
            slot = self.index.add_instance(name, PARTS[name])
            assert slot < len(PARTS), "slots are used again"
            self.held |= {shard: {tier: set() for tier in Tier} for shard in PARTS[name]}

    @rule(
        shard=st.sampled_from([shard for shards in PARTS.values() for shard in shards]),
        tier=st.sampled_from(Tier),
        keys=st.one_of(
            st.lists(st.sampled_from(KEYS), max_size=8),
            st.sampled_from(CHAINS).flatmap(lambda chain: st.integers(1, 6).map(lambda n: chain[:n])),
        ),
        is_stored=st.booleans(),
    )
    def change(self, shard: str, tier: Tier, keys: list[bytes], is_stored: bool) -> None:
        self.index.apply(shard, [KVStored(tier, keys) if is_stored else KVRemoved(tier, keys)])
        if shard in self.held:
            (set.update if is_stored else set.difference_update)(self.held[shard][tier], keys)

    @rule(shard=st.sampled_from(["p0", "p1.0", "d1.2"]), keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def start_over(self, shard: str, keys: list[bytes]) -> None:
        self.index.apply(shard, [KVStored(SSD, KEYS[:1]), KVCleared(), KVStored(DRAM, keys)])
        if shard in self.held:
            self.held[shard] = {DRAM: set(keys), SSD: set(), DEVICE: set()}

    @invariant()
    def prompts_match_what_is_held(self) -> None:
        for chain in CHAINS:
            assert matched(self.index, chain) == {name: self._expected(name, chain) for name in self.names}
            assert matched_own(self.index, chain) == {
                name: self._expected_own(name, chain) for name in self.names
            }

    @invariant()
    def blocks_are_counted(self) -> None:
        held = {key for tiers in self.held.values() for keys in tiers.values() for key in keys}
        assert self.index.num_blocks == len(held)
        for shard, tiers in self.held.items():
            assert self.index.num_held(shard) == {tier: len(keys) for tier, keys in tiers.items()}

    def _expected_own(self, name: str, chain: Sequence[bytes]) -> tuple[int, int]:
        """The longer prefix of the instance's two, and the blocks of it that it reads from SSD."""
        shards = [self.held[shard] for shard in PARTS[name]]
        num_cached = 0
        while num_cached < len(chain) and all(chain[num_cached] in shard[DEVICE] for shard in shards):
            num_cached += 1
        num_pooled, _ = self._expected(name, chain)
        to_load = chain[num_cached:num_pooled]
        num_ssd = sum(not all(key in shard[DRAM] for shard in shards) for key in to_load)
        return max(num_cached, num_pooled), num_ssd

    def _expected(self, name: str, chain: Sequence[bytes]) -> tuple[int, int]:
        shards = [self.held[shard] for shard in PARTS[name]]
        num_blocks = num_dram_blocks = 0
        for key in chain:
            if not all(key in shard[DRAM] or key in shard[SSD] for shard in shards):
                break
            num_blocks += 1
            num_dram_blocks += all(key in shard[DRAM] for shard in shards)
        return num_blocks, num_dram_blocks


Pools.TestCase.settings = settings(max_examples=num_examples(60), stateful_step_count=40)
TestPools = Pools.TestCase


def test_a_prompt_is_held_up_to_its_first_missing_block() -> None:
    index = index_of("p0", "d0")
    index.apply("p0", [KVStored(DRAM, [KEYS[0], KEYS[1], KEYS[3]])])
    index.apply("d0", [KVStored(DRAM, KEYS[1:])])
    assert matched(index, KEYS[:5]) == {"p0": (2, 2), "d0": (0, 0)}
    assert matched(index, KEYS[1:3]) == {"p0": (1, 1), "d0": (2, 2)}
    assert matched(index, []) == {"p0": (0, 0), "d0": (0, 0)}


def test_blocks_on_ssd_count_but_not_as_dram() -> None:
    index = index_of("p0")
    index.apply("p0", [KVStored(SSD, KEYS[:5]), KVStored(DRAM, KEYS[2:4])])
    assert matched(index, KEYS) == {"p0": (5, 2)}
    index.apply("p0", [KVRemoved(SSD, KEYS[2:5])])
    assert matched(index, KEYS) == {"p0": (4, 2)}


def test_an_engine_s_own_cache_counts_where_it_is() -> None:
    """It is longer or shorter than the pool's prefix, but does not extend it; and nobody else can have it."""
    index = index_of("p0", "d0")
    index.apply("p0", [KVStored(SSD, KEYS[:4]), KVStored(DEVICE, KEYS[:2])])
    index.apply("d0", [KVStored(DRAM, KEYS[:1]), KVStored(DEVICE, KEYS[:3])])
    assert matched(index, KEYS) == {"p0": (4, 0), "d0": (1, 1)}
    assert matched_own(index, KEYS) == {"p0": (4, 2), "d0": (3, 0)}
    index.apply("d0", [KVRemoved(DEVICE, KEYS[:1])])
    assert matched_own(index, KEYS) == {"p0": (4, 2), "d0": (1, 0)}


def test_a_group_holds_what_all_of_its_shards_hold() -> None:
    index = index_of("p1", "p0")
    index.apply("p1.0", [KVStored(DRAM, KEYS[:4])])
    assert matched(index, KEYS) == {"p1": (0, 0), "p0": (0, 0)}
    index.apply("p1.1", [KVStored(DRAM, KEYS[:2]), KVStored(SSD, KEYS[:3])])
    assert matched(index, KEYS) == {"p1": (3, 2), "p0": (0, 0)}
    index.apply("p1.0", [KVCleared()])
    assert matched(index, KEYS) == {"p1": (0, 0), "p0": (0, 0)}


def test_an_instance_in_the_slot_of_a_former_one_holds_nothing() -> None:
    index = index_of("p0", "d0")
    index.apply("p0", [KVStored(DRAM, KEYS)])
    index.apply("d0", [KVStored(DRAM, KEYS[:1])])
    slot = index.slots["p0"]
    index.remove_instance("p0")
    assert index.match(KEYS).num_blocks[slot] == 0
    assert index.add_instance("p2") == slot
    assert matched(index, KEYS) == {"d0": (1, 1), "p2": (0, 0)}


def test_events_of_unknown_instances_and_keys_of_another_length_are_ignored() -> None:
    index = index_of("p0")
    index.apply("gone", [KVStored(DRAM, KEYS)])
    index.apply("p0", [KVStored(DRAM, [b"", b"short", *KEYS[:2], bytes(17)]), KVRemoved(SSD, [b"x"])])
    assert index.num_blocks == 2
    assert matched(index, KEYS) == {"p0": (2, 2)}


@pytest.mark.parametrize(("name", "shards"), [("p1", ()), ("p2", ("p1.0",)), ("p2", ("x", "x"))])
def test_a_name_that_is_taken_is_refused(name: str, shards: tuple[str, ...]) -> None:
    index = index_of("p1")
    with pytest.raises(ValueError, match="taken"):
        index.add_instance(name, shards)


def test_a_thousand_instances_and_long_prompts() -> None:
    draw = random.Random(7)
    index = PrefixIndex()
    keys = [number.to_bytes(16, "big") for number in range(700)]
    expected = {}
    for number in range(1000):
        index.add_instance(f"p{number}")
        num_blocks, num_ssd = draw.randrange(701), draw.randrange(10)
        events: list[KVEvent] = [
            KVStored(SSD, keys[:num_ssd]),
            KVStored(DRAM, keys[num_ssd:num_blocks]),
        ]
        index.apply(f"p{number}", events)
        expected[f"p{number}"] = max(num_blocks, num_ssd), max(0, num_blocks - num_ssd)
    assert matched(index, keys) == expected
    for number in range(1000):
        index.remove_instance(f"p{number}")
    assert not index.match(keys).num_blocks.any()
    assert index.num_blocks == 0
    assert index.num_stale_blocks == 700
