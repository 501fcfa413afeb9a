import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events.batches import MAX_BATCH_BLOCKS, BlockTokens, EventBatch, EventLog
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier

KEYS = [bytes([number]) * 16 for number in range(6)]
A, B, C = KEYS[:3]
DRAM, SSD = Tier.DRAM, Tier.SSD


def log_after_start(capacity_batches: int = 8) -> EventLog:
    """A log whose first batch, which only says that all is cleared, has been sealed."""
    log = EventLog(capacity_batches)
    log.seal()
    return log


def sealed(log: EventLog) -> EventBatch:
    batch = log.seal()
    assert batch is not None
    return batch


def apply(batches: Iterable[EventBatch], held: set[tuple[Tier, bytes]]) -> None:
    for batch in batches:
        for event in batch.events:
            match event:
                case KVStored(tier, keys):
                    held |= {(tier, key) for key in keys}
                case KVRemoved(tier, keys):
                    held -= {(tier, key) for key in keys}
                case KVCleared():
                    held.clear()


def test_first_batch_has_number_0_and_begins_with_cleared() -> None:
    log = EventLog(8)
    log.stored(DRAM, A)
    assert log.seal() == EventBatch(0, [KVCleared(), KVStored(DRAM, [A])], {})


def test_numbers_count_sealed_batches_and_empty_ones_are_not_sealed() -> None:
    log = log_after_start()
    assert log.seal() is None
    log.stored(DRAM, A)
    assert sealed(log).sequence == 1
    assert log.seal() is None
    log.removed(DRAM, A)
    assert sealed(log).sequence == 2
    assert (log.oldest_sequence, log.next_sequence) == (0, 3)


def test_consecutive_events_of_one_kind_and_tier_become_one() -> None:
    log = log_after_start()
    log.stored(DRAM, A)
    log.stored(DRAM, B)
    log.stored(SSD, A)
    log.removed(SSD, C)
    log.removed(SSD, B)
    log.stored(SSD, C)
    expected: list[KVEvent] = [
        KVStored(DRAM, [A, B]),
        KVStored(SSD, [A]),
        KVRemoved(SSD, [C, B]),
        KVStored(SSD, [C]),
    ]
    assert sealed(log).events == expected


def test_events_after_a_seal_do_not_change_the_sealed_batch() -> None:
    log = log_after_start()
    log.stored(DRAM, A)
    batch = sealed(log)
    log.stored(DRAM, B, BlockTokens(A, [1]))
    assert batch == EventBatch(1, [KVStored(DRAM, [A])], {})
    assert sealed(log).events == [KVStored(DRAM, [B])]


def test_cleared_voids_what_the_batch_has_collected() -> None:
    log = log_after_start()
    log.stored(DRAM, A, BlockTokens(None, [1, 2]))
    log.cleared()
    log.stored(DRAM, B)
    assert log.seal() == EventBatch(1, [KVCleared(), KVStored(DRAM, [B])], {})


def test_tokens_are_kept_for_the_blocks_that_have_them() -> None:
    log = log_after_start()
    tokens = BlockTokens(A, [1, 2])
    log.stored(DRAM, A)
    log.stored(DRAM, B, tokens)
    assert sealed(log).tokens == {B: tokens}


def test_since_gives_the_rest_or_nothing_when_some_are_gone() -> None:
    log = EventLog(capacity_batches=3)
    for key in KEYS[:5]:
        log.stored(DRAM, key)
        log.seal()
    for start in (2, 3, 4):
        batches = log.since(start)
        assert batches is not None
        assert [batch.sequence for batch in batches] == list(range(start, 5))
    assert log.since(5) == []
    assert log.oldest_sequence == 2
    assert log.since(1) is None
    assert log.since(6) is None, "a number that this log has not given yet is from another log"
    assert log.since(-1) is None


def test_listeners_hear_the_first_event_of_each_batch_only() -> None:
    log = log_after_start()
    heard: list[str] = []
    log.on_event(lambda: heard.append("first"))
    log.on_event(lambda: heard.append("second"))
    log.stored(DRAM, A)
    log.removed(DRAM, A)
    assert heard == ["first", "second"]
    log.seal()
    assert len(heard) == 2
    log.removed(SSD, B)
    assert len(heard) == 4
    log.seal()
    log.cleared()
    assert len(heard) == 6


@pytest.mark.parametrize("alternating", [False, True])
def test_a_batch_is_bounded_even_if_nobody_seals(alternating: bool) -> None:
    log = log_after_start(capacity_batches=2)
    heard: list[int] = []
    log.on_event(lambda: heard.append(log.next_sequence))
    for number in range(5 * MAX_BATCH_BLOCKS + 1):
        log.stored(SSD if alternating and number % 2 else DRAM, A)
    assert (log.oldest_sequence, log.next_sequence) == (4, 6)
    assert heard == [1, 2, 3, 4, 5, 6], "the first event of each batch wakes the publisher"
    batches = log.since(4)
    assert batches is not None
    for batch in batches:
        assert (
            sum(len(event.keys) for event in batch.events if isinstance(event, KVStored)) == MAX_BATCH_BLOCKS
        )
    assert sealed(log).events == [KVStored(DRAM, [A])]


def test_many_at_once_are_collected_as_one_after_the_other() -> None:
    ones, many = log_after_start(), log_after_start()
    rng = random.Random(1)
    for number in range(20):
        keys = [number.to_bytes(16, "big")] * rng.choice([0, 1, 7, MAX_BATCH_BLOCKS - 1, MAX_BATCH_BLOCKS])
        for key in keys:
            ones.stored(DRAM, key) if number % 3 else ones.removed(DRAM, key)
        many.stored_all(DRAM, keys) if number % 3 else many.removed_all(DRAM, keys)
        assert many.next_sequence == ones.next_sequence
    ones.seal(), many.seal()
    assert many.since(many.oldest_sequence) == ones.since(ones.oldest_sequence)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.sampled_from(Tier), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["cleared", "seal", "snapshot"])),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, capacity_batches=st.integers(1, 5))
def test_snapshot_and_what_follows_it_are_the_pools_contents(
    operations: list[tuple[str, Tier, bytes] | tuple[str]], capacity_batches: int
) -> None:
    """Replay from 0 gives the contents, and so does any snapshot with all later batches; or they are gone."""
    log, pool = EventLog(capacity_batches), set[tuple[Tier, bytes]]()
    snapshots: list[tuple[int, set[tuple[Tier, bytes]]]] = [(0, set())]
    for operation in operations:
        match operation:
            case ("flip", tier, key) if (tier, key) in pool:
                pool.remove((tier, key))
                log.removed(tier, key)
            case ("flip", tier, key):
                pool.add((tier, key))
                log.stored(tier, key)
            case ("cleared",):
                pool.clear()
                log.cleared()
            case ("seal",):
                log.seal()
            case _:
                log.seal()
                snapshots.append((log.next_sequence, set(pool)))
    log.seal()
    for next_sequence, held in snapshots:
        batches = log.since(next_sequence)
        if batches is None:
            assert next_sequence < log.oldest_sequence
            assert log.next_sequence - log.oldest_sequence == capacity_batches
        else:
            apply(batches, held)
            assert held == pool
