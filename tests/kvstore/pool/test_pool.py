"""The pool: when a block is found, which one is evicted, what a refusal says, what is counted."""

import pytest

from kvstore.pool.pages import PageState, PageTable, PageWriter
from kvstore.pool.pool import Pool
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.pools import Tier
from tests.kvstore.pool.in_memory import (
    CHECKSUMS,
    KEYS,
    NUM_LAYERS,
    NUM_PAGES,
    FakeTier,
    fill,
    fill_up,
    new_pool,
    store,
)

ALICE, BOB = 1, 2
WRITER = PageWriter(pid=100, serial=2)


def found(pool: Pool, *keys: bytes) -> list[bool]:
    reservation = pool.reserve(0, keys, 0)
    pool.release(reservation.reservation_id)
    return [block.found for block in reservation.blocks]


def test_block_is_found_only_when_all_layers_have_arrived() -> None:
    pool = new_pool()
    reservation = pool.reserve(1, KEYS[:1], 0)
    fill(pool, reservation.blocks[0], range(1))
    assert found(pool, KEYS[0]) == [False]
    fill(pool, reservation.blocks[0], range(1, 2))
    assert found(pool, KEYS[0]) == [True]


def test_first_to_seal_a_key_wins_and_the_other_page_is_freed_at_release() -> None:
    pool = new_pool()
    first, second = pool.reserve(1, KEYS[:1], 0), pool.reserve(2, KEYS[:1], 0)
    fill(pool, second.blocks[0])
    fill(pool, first.blocks[0])
    assert pool.is_complete(first.blocks[0])
    assert pool.reserve(3, KEYS[:1], 0).blocks[0].page == second.blocks[0].page
    pool.release(first.reservation_id)
    assert pool.table.state(first.blocks[0].page) is PageState.FREE
    assert pool.check_integrity() is None


def test_evicts_least_recently_used_unleased_block() -> None:
    pool = new_pool(num_pages=3)
    for key in KEYS[:3]:
        store(pool, key)
    assert found(pool, KEYS[0]) == [True]  # used again: now the youngest
    store(pool, KEYS[3])
    leased = pool.reserve(1, [KEYS[0], KEYS[2], KEYS[3]], 0)
    assert [block.found for block in leased.blocks] == [True, True, True]
    assert pool.evictor.num_evictions == 1


def test_of_one_prompt_the_last_block_is_evicted_first() -> None:
    pool = new_pool(num_pages=3)
    store(pool, *KEYS[:3])
    store(pool, KEYS[3])
    kept = pool.reserve(1, KEYS[:2], 0)
    assert [block.found for block in kept.blocks] == [True, True]


def test_full_pool_refuses_and_changes_nothing() -> None:
    pool = new_pool(num_pages=3)
    store(pool, KEYS[0])
    pool.reserve(1, [], 2)
    with pytest.raises(PoolFullError, match=r"2 pages are needed, 0 are free and 1 evictable of 3"):
        pool.reserve(2, KEYS[1:3], 0)
    # The hit would have to be evicted to make room for the miss.
    with pytest.raises(PoolFullError, match="1 pages are needed, 0 are free and 0 evictable"):
        pool.reserve(2, KEYS[:2], 0)
    assert pool.check_integrity() is None
    assert found(pool, KEYS[0]) == [True]


def test_reservation_larger_than_the_pool_is_not_merely_full() -> None:
    with pytest.raises(PoolError) as refusal:
        new_pool(num_pages=2).reserve(1, KEYS[:3], 0)
    assert not isinstance(refusal.value, PoolFullError)


def test_refused_request_for_more_than_can_be_had_does_not_ask_for_room_that_cannot_come() -> None:
    """Making room for it would cost all that is cached, and still not be enough."""
    pool = new_pool()
    store(pool, *KEYS[:2])
    pool.reserve(ALICE, [], 3)
    with pytest.raises(PoolFullError):
        pool.reserve(BOB, [], 4)
    assert pool.evictor.num_wanted == 0


def test_refused_request_that_could_be_served_asks_for_its_room() -> None:
    calls: list[None] = []
    pool = Pool(
        PageTable.in_memory(NUM_PAGES, NUM_LAYERS), lower=FakeTier(), on_pressure=lambda: calls.append(None)
    )
    store(pool, *KEYS[:NUM_PAGES])
    assert calls == []
    with pytest.raises(PoolFullError):
        pool.reserve(BOB, [], 4)
    assert (pool.evictor.num_wanted, len(calls)) == (4, 1)


def test_lease_ends_at_its_deadline_and_is_counted() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    early, late = (pool.lease(ALICE, [KEYS[0]], deadline_s) for deadline_s in (5.0, 7.0))
    pool.expire(4.9)
    assert len(pool.leases) == 2
    pool.expire(5.0)
    assert (pool.leases.get(early.lease_id), pool.leases.get(late.lease_id)) == (None, late)
    assert pool.num_used_pages == 1
    pool.expire(100.0)
    assert (len(pool.leases), pool.num_used_pages, pool.counters.num_expired_leases) == (0, 0, 2)


def test_lease_that_ended_in_time_does_not_expire() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    pool.end_lease(pool.lease(ALICE, [KEYS[0]], 5.0).lease_id)
    pool.expire(6.0)
    assert pool.counters.num_expired_leases == 0
    assert pool.check_integrity() is None


def test_hits_are_counted_by_the_tier_where_the_block_was_and_misses_by_their_reason() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    promotion = pool.begin_promotion(KEYS[1], position=4)
    pool.finish_promotion(promotion, CHECKSUMS, num_uses=9)
    pool.release(promotion.reservation_id)
    for _ in range(2):
        pool.end_lease(pool.lease(ALICE, [KEYS[0], KEYS[1], KEYS[2]], 5.0).lease_id)
    assert pool.hits.num_hits == {Tier.DRAM: 3, Tier.SSD: 1}
    assert pool.hits.num_misses == {"absent": 3}  # one when it was stored
    fill_up(pool)
    pool.end_lease(pool.lease(ALICE, [KEYS[0], KEYS[2]], 5.0).lease_id)
    assert pool.hits.num_misses["evicted"] == 1


def test_promoted_block_that_nobody_asked_for_leaves_no_hit_to_the_next_one_in_its_page() -> None:
    pool = new_pool(num_pages=1)
    for forget in (lambda: fill_up(pool, 1), lambda: pool.remove(KEYS[0])):
        promotion = pool.begin_promotion(KEYS[0], position=0)
        pool.finish_promotion(promotion, CHECKSUMS, num_uses=1)
        pool.release(promotion.reservation_id)
        forget()
        store(pool, KEYS[1])
        pool.end_lease(pool.lease(ALICE, KEYS[1:2], 5.0).lease_id)
    assert pool.hits.num_hits == {Tier.DRAM: 2, Tier.SSD: 0}


def test_promoted_block_keeps_its_uses_and_position() -> None:
    pool = new_pool()
    promotion = pool.begin_promotion(KEYS[0], position=4)
    (block,) = promotion.blocks
    pool.finish_promotion(promotion, CHECKSUMS, num_uses=9)
    assert (int(pool.table.positions[block.page]), int(pool.table.num_uses[block.page])) == (4, 9)


def test_page_that_a_peer_was_copying_to_is_nobodys_until_its_process_is_gone() -> None:
    table, copier = PageTable.in_memory(NUM_PAGES, NUM_LAYERS), PageWriter.copier(1234)
    old = Pool(table)
    granted = old.reserve(ALICE, KEYS[:1], 0).blocks[0].page
    written = old.reserve(BOB, KEYS[1:2], 0, WRITER).blocks[0].page
    table.assign(copier)
    pool = Pool(table)
    pool.holds.keep_aside(copier)
    assert table.state(granted) is table.state(written) is PageState.QUARANTINED
    pool.holds.writer_gone(WRITER)
    assert table.state(written) is PageState.QUARANTINED
    assert pool.holds.former_writers == [copier]
    pool.holds.writer_gone(copier)
    assert table.state(granted) is table.state(written) is PageState.FREE
    assert pool.check_integrity() is None


def test_soft_pins_come_and_go_and_a_hard_one_stays() -> None:
    pool = new_pool()
    store(pool, *KEYS[:2])
    pool.pins.add(KEYS[:1], hard=True, deadline_s=9.0)
    assert pool.pins.add(KEYS[:2], hard=False, deadline_s=5.0) == 2
    assert pool.pins.remove(KEYS[:2], hard=False) == 1
    pool.expire(8.0)
    assert (len(pool.pins), pool.num_used_pages) == (1, 1)
    assert pool.pins.remove(KEYS[:2]) == 1
    assert (len(pool.pins), pool.num_used_pages, pool.check_integrity()) == (0, 0, None)


def test_removed_or_damaged_block_loses_its_pin() -> None:
    pool = new_pool()
    store(pool, *KEYS[:2])
    damaged = pool.find(KEYS[1])
    assert damaged is not None
    pool.pins.add(KEYS[:2], hard=True, deadline_s=9.0)
    assert pool.remove(KEYS[0])
    pool.drop(damaged)
    assert (len(pool.pins), pool.num_used_pages) == (0, 0)
    assert pool.table.count()[PageState.FREE] == NUM_PAGES
    store(pool, *KEYS[:2])
    pool.expire(9.0)  # of the pins that were
    assert pool.check_integrity() is None
