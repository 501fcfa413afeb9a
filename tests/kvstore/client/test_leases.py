"""What keeps a block where it is: leases, pins, holds, writers of a former life, and a tier below.

The state machine at the end checks, after every step, that nothing which somebody relies on has been evicted,
overwritten or lost, and that every page is accounted for.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.pool.claims import PageReservation
from kvstore.pool.pages import PageState, PageTable, PageWriter
from kvstore.pool.pool import Pool
from mooncake.config.policies import EvictionPolicy
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier

NUM_PAGES, NUM_LAYERS = 6, 2
ALL_LAYERS = range(NUM_LAYERS)
CHECKSUMS = bytes(8 * NUM_LAYERS)
KEYS = [bytes([number]) * 16 for number in range(1, 10)]
ALICE, BOB = 1, 2
WRITERS = {ALICE: PageWriter(pid=100, serial=1), BOB: PageWriter(pid=100, serial=2)}


@dataclass
class FakeTier:
    """What is below DRAM: says that it holds what the test put there."""

    is_accepting: bool = True
    held: set[BlockKey] = field(default_factory=set)

    def holds(self, key: BlockKey) -> bool:
        return key in self.held


def new_pool(num_pages: int = NUM_PAGES, lower: FakeTier | None = None) -> Pool:
    return Pool(PageTable.in_memory(num_pages, NUM_LAYERS), lower=lower)


def store(pool: Pool, *keys: BlockKey) -> list[int]:
    """Seals `keys` and leaves them to eviction. Returns their pages."""
    reservation = pool.reserve(ALICE, keys, 0)
    for block in reservation.blocks:
        if not block.found:
            pool.arrived(reservation, block, ALL_LAYERS, CHECKSUMS)
    pool.release(reservation.reservation_id)
    return [block.page for block in reservation.blocks]


def fill_up(pool: Pool, num_blocks: int = NUM_PAGES) -> None:
    """Stores so many blocks that nobody has seen before."""
    for number in range(num_blocks):
        store(pool, b"other" + number.to_bytes(11, "big"))


# -- leases -------------------------------------------------------------------------------------------


def test_leased_block_stays_until_its_lease_ends() -> None:
    pool = new_pool()
    (page,) = store(pool, KEYS[0])
    lease = pool.lease(ALICE, [KEYS[0], KEYS[1]], deadline_s=9.0)
    assert lease.pages == [page, None]
    fill_up(pool)
    assert pool.find(KEYS[0]) == page
    pool.end_lease(lease.lease_id)
    pool.end_lease(lease.lease_id)
    fill_up(pool)
    assert pool.find(KEYS[0]) is None
    assert pool.check_integrity() is None


def test_lease_ends_at_its_deadline_and_is_counted() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    early, late = (pool.lease(ALICE, [KEYS[0]], deadline_s) for deadline_s in (5.0, 7.0))
    pool.expire(4.9)
    assert pool.num_leases == 2
    pool.expire(5.0)
    assert (pool.find_lease(early.lease_id), pool.find_lease(late.lease_id)) == (None, late)
    assert pool.num_used_pages == 1
    pool.expire(100.0)
    assert (pool.num_leases, pool.num_used_pages, pool.counters.num_expired_leases) == (0, 0, 2)


def test_lease_that_ended_in_time_does_not_expire() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    pool.end_lease(pool.lease(ALICE, [KEYS[0]], 5.0).lease_id)
    pool.expire(6.0)
    assert pool.counters.num_expired_leases == 0
    assert pool.check_integrity() is None


def test_key_that_is_named_twice_is_leased_and_reserved_once() -> None:
    pool = new_pool()
    (page,) = store(pool, KEYS[0])
    lease = pool.lease(ALICE, [KEYS[0], KEYS[0]], 5.0)
    reservation = pool.reserve(BOB, [KEYS[0], KEYS[0]], 0)
    assert lease.pages == [b.page for b in reservation.blocks] == [page, page]
    assert pool.check_integrity() is None
    pool.end_lease(lease.lease_id)
    pool.release(reservation.reservation_id)
    assert pool.num_used_pages == 0
    assert pool.check_integrity() is None


def test_claims_are_those_of_their_owner() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    ours, theirs = pool.lease(ALICE, KEYS[:1], 5.0), pool.lease(BOB, KEYS[:1], 5.0)
    reservation = pool.reserve(BOB, KEYS[1:2], 0)
    assert pool.claims_of(ALICE) == ([], [ours.lease_id])
    assert pool.claims_of(BOB) == ([reservation.reservation_id], [theirs.lease_id])


def test_ended_leases_with_far_deadlines_leave_nothing_behind() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    for _ in range(5000):
        pool.end_lease(pool.lease(ALICE, KEYS[:1], 1e9).lease_id)
    assert pool.lease_deadlines.num_entries < 1500


def test_hits_are_counted_by_the_tier_where_the_block_was_and_misses_by_their_reason() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    promotion = pool.begin_promotion(KEYS[1], position=4)
    pool.promoted(promotion, CHECKSUMS, num_uses=9)
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
        pool.promoted(promotion, CHECKSUMS, num_uses=1)
        pool.release(promotion.reservation_id)
        forget()
        store(pool, KEYS[1])
        pool.end_lease(pool.lease(ALICE, KEYS[1:2], 5.0).lease_id)
    assert pool.hits.num_hits == {Tier.DRAM: 2, Tier.SSD: 0}


def test_promoted_block_keeps_its_uses_and_position() -> None:
    pool = new_pool()
    promotion = pool.begin_promotion(KEYS[0], position=4)
    (block,) = promotion.blocks
    pool.promoted(promotion, CHECKSUMS, num_uses=9)
    assert (int(pool.table.positions[block.page]), int(pool.table.num_uses[block.page])) == (4, 9)


# -- pins ---------------------------------------------------------------------------------------------


def test_hard_pin_keeps_a_block_at_any_price_and_a_soft_one_as_long_as_others_can_go() -> None:
    pool = new_pool()
    hard, soft = KEYS[0], KEYS[1]
    store(pool, hard, soft)
    assert pool.pins.add([hard, KEYS[5]], hard=True, deadline_s=9.0) == 1
    assert pool.pins.add([soft], hard=False, deadline_s=9.0) == 1
    fill_up(pool, 20)
    assert pool.locate([hard, soft]) == [Tier.DRAM, Tier.DRAM]
    reservation = pool.reserve(ALICE, [], NUM_PAGES - 1)
    assert pool.locate([hard, soft]) == [Tier.DRAM, None]
    with pytest.raises(PoolFullError):
        pool.reserve(ALICE, [], 1)
    pool.release(reservation.reservation_id)
    assert len(pool.pins) == 1, "a pin ends with its block"
    assert pool.check_integrity() is None


@pytest.mark.parametrize(("first_is_hard", "second_is_hard"), [(True, True), (False, True), (False, False)])
def test_new_pin_replaces_the_old_one(first_is_hard: bool, second_is_hard: bool) -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    pool.pins.add(KEYS[:1], hard=first_is_hard, deadline_s=5.0)
    pool.pins.add(KEYS[:1], hard=second_is_hard, deadline_s=9.0)
    assert (len(pool.pins), pool.num_used_pages) == (1, int(second_is_hard))
    pool.expire(8.0)
    assert len(pool.pins) == 1
    fill_up(pool, 20)
    assert pool.find(KEYS[0]) is not None
    pool.expire(9.0)
    assert (len(pool.pins), pool.num_used_pages) == (0, 0)
    fill_up(pool)
    assert pool.find(KEYS[0]) is None
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


def test_hard_pins_take_at_most_half_of_the_pool() -> None:
    pool = new_pool()
    store(pool, *KEYS[:4])
    pool.pins.add(KEYS[:3], hard=True, deadline_s=9.0)
    assert pool.pins.add(KEYS[:3], hard=True, deadline_s=9.0) == 3, "anew is not more"
    with pytest.raises(PoolError, match="4 of 6 pages would be pinned hard, at most half may be"):
        pool.pins.add(KEYS[3:4], hard=True, deadline_s=9.0)
    assert len(pool.pins) == 3
    pool.pins.remove(KEYS[:1])
    pool.pins.add(KEYS[:1], hard=False, deadline_s=9.0)
    assert pool.pins.add(KEYS[3:4], hard=True, deadline_s=9.0) == 1
    assert pool.pins.remove(KEYS) == 4
    assert (pool.num_used_pages, pool.check_integrity()) == (0, None)


def test_removed_or_damaged_block_loses_its_pin() -> None:
    pool = new_pool()
    (_, damaged) = store(pool, *KEYS[:2])
    pool.pins.add(KEYS[:2], hard=True, deadline_s=9.0)
    assert pool.remove(KEYS[0])
    pool.drop(damaged)
    assert (len(pool.pins), pool.num_used_pages) == (0, 0)
    assert pool.table.count()[PageState.FREE] == NUM_PAGES
    store(pool, *KEYS[:2])
    pool.expire(9.0)  # of the pins that were
    assert pool.check_integrity() is None


def test_pins_that_are_renewed_again_and_again_leave_nothing_behind() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    for number in range(5000):
        pool.pins.add(KEYS[:1], hard=True, deadline_s=1e9 + number)
    assert pool.pins.deadlines.num_entries < 1500
    pool.expire(1e9 + 4998)
    assert len(pool.pins) == 1
    pool.expire(1e9 + 4999)
    assert len(pool.pins) == 0


# -- a tier below -------------------------------------------------------------------------------------


def test_block_that_only_dram_has_is_not_evicted_while_the_tier_below_accepts() -> None:
    lower = FakeTier()
    pool = new_pool(lower=lower)
    store(pool, *KEYS[:NUM_PAGES])
    with pytest.raises(PoolFullError):
        pool.reserve(ALICE, [], 1)
    lower.held.add(KEYS[NUM_PAGES - 1])  # the coldest: the last of its prompt
    pool.release(pool.reserve(ALICE, [], 1).reservation_id)
    assert pool.locate(KEYS[:NUM_PAGES]) == [Tier.DRAM] * (NUM_PAGES - 1) + [Tier.SSD]
    pool.release(pool.reserve(ALICE, [], 1).reservation_id)
    with pytest.raises(PoolFullError):
        pool.reserve(ALICE, [], 2)
    lower.is_accepting = False
    pool.reserve(ALICE, [], NUM_PAGES)
    assert pool.locate(KEYS[: NUM_PAGES - 1]) == [None] * (NUM_PAGES - 1)


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


# -- writers of a former life -------------------------------------------------------------------------


def test_page_that_a_writer_may_still_write_is_nobodys_until_he_is_gone() -> None:
    table = PageTable.in_memory(NUM_PAGES, NUM_LAYERS)
    old = Pool(table)
    written = old.reserve(ALICE, KEYS[:1], 1, WRITERS[ALICE])
    old.reserve(BOB, KEYS[1:2], 0, WRITERS[BOB])
    old.reserve(3, KEYS[2:3], 0)  # written by the messenger itself, which is dead
    pool = Pool(table)
    assert set(pool.former_writers) == set(WRITERS.values())
    assert pool.table.count()[PageState.QUARANTINED] == 3
    assert pool.check_integrity() is None
    pool.writer_gone(WRITERS[ALICE])
    pool.writer_gone(WRITERS[ALICE])
    assert pool.former_writers == [WRITERS[BOB]]
    for block in written.blocks:
        assert table.state(block.page) is PageState.FREE
        assert table.generation(block.page) == block.generation + 1
    pool.reserve(ALICE, [], NUM_PAGES - 1)
    with pytest.raises(PoolFullError):
        pool.reserve(ALICE, [], 1)
    pool.writer_gone(WRITERS[BOB])
    assert pool.reserve(ALICE, [], 1).blocks[0].page not in {block.page for block in written.blocks}
    assert pool.check_integrity() is None


def test_page_that_a_peer_was_copying_to_is_nobodys_until_its_process_is_gone() -> None:
    table, copier = PageTable.in_memory(NUM_PAGES, NUM_LAYERS), PageWriter.copier(1234)
    old = Pool(table)
    granted = old.reserve(ALICE, KEYS[:1], 0).blocks[0].page
    written = old.reserve(BOB, KEYS[1:2], 0, WRITERS[BOB]).blocks[0].page
    table.assign(copier)
    pool = Pool(table)
    pool.keep_aside(copier)
    assert table.state(granted) is table.state(written) is PageState.QUARANTINED
    pool.writer_gone(WRITERS[BOB])
    assert table.state(written) is PageState.QUARANTINED
    assert pool.former_writers == [copier]
    pool.writer_gone(copier)
    assert table.state(granted) is table.state(written) is PageState.FREE
    assert pool.check_integrity() is None


# -- everything at once -------------------------------------------------------------------------------


@dataclass
class Claim:
    """Pages that somebody relies on, as (page, generation)."""

    owner: int
    places: list[tuple[int, int]]
    deadline_s: float | None = None


keys_drawn = st.lists(st.sampled_from(KEYS), max_size=4)


class LeaseModel(RuleBasedStateMachine):
    """Knows who relies on which page; eviction may take whatever else it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = FakeTier()
        self.table = PageTable.in_memory(NUM_PAGES, NUM_LAYERS)
        self.now_s = 0.0
        self.reservations: dict[int, Claim] = {}
        self.promotions: dict[int, PageReservation] = {}
        self.leases: dict[int, Claim] = {}
        self.hard: dict[BlockKey, Claim] = {}
        self.soft: dict[BlockKey, float] = {}
        self.holds: list[tuple[int, int]] = []
        self.former: dict[PageWriter, list[tuple[int, int]]] = {}
        self.in_dram: dict[BlockKey, int] = {}
        """as of the end of the last step"""
        self.gone: set[BlockKey] = set()
        """taken out of DRAM in this step, by name"""

    @initialize(policy=st.sampled_from(EvictionPolicy))
    def open(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.pool = Pool(self.table, policy=policy, lower=self.lower)

    # -- what the model knows ---------------------------------------------------------------------

    def place(self, page: int) -> tuple[int, int]:
        return page, self.table.generation(page)

    def relied_on(self) -> list[tuple[int, int]]:
        claims = [*self.reservations.values(), *self.leases.values(), *self.hard.values()]
        places = [place for claim in claims for place in claim.places] + self.holds
        places += [self.place(r.blocks[0].page) for r in self.promotions.values()]
        return places + [place for places in self.former.values() for place in places]

    def idle(self) -> set[BlockKey]:
        used = {page for page, _ in self.relied_on()}
        return {key for key, page in self.in_dram.items() if page not in used}

    def unpinned(self, key: BlockKey) -> None:
        self.hard.pop(key, None)
        self.soft.pop(key, None)

    # -- reservations -----------------------------------------------------------------------------

    @rule(
        keys=keys_drawn,
        num_private=st.integers(0, 2),
        owner=st.sampled_from([ALICE, BOB]),
        writes=st.booleans(),
    )
    def reserve(self, keys: list[BlockKey], num_private: int, owner: int, writes: bool) -> None:
        num_missing = sum(key not in self.in_dram for key in keys) + num_private
        num_free = self.table.count()[PageState.FREE]
        evictable = self.idle() - set(keys)
        has_room = num_missing <= num_free + len(evictable)
        needs_disk = self.lower.is_accepting and num_missing > num_free
        try:
            reservation = self.pool.reserve(owner, keys, num_private, WRITERS[owner] if writes else None)
        except PoolFullError:
            assert not has_room or (needs_disk and not evictable <= self.lower.held)
            return
        assert has_room
        assert not needs_disk or evictable & self.lower.held
        used = {page for page, _ in self.relied_on()}
        for block in reservation.blocks:
            assert block.found or block.page not in used, "a page that somebody relies on was given away"
        places = [(block.page, block.generation) for block in reservation.blocks]
        self.reservations[reservation.reservation_id] = Claim(owner, places)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), layers=st.sampled_from([ALL_LAYERS, range(1), range(1, 2)]))
    def arrive(self, data: st.DataObject, layers: range) -> None:
        reservation = self.pool.find_reservation(data.draw(st.sampled_from(list(self.reservations))))
        assert reservation is not None
        blocks = [b for b in reservation.blocks if not any(b.arrived >> layer & 1 for layer in layers)]
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.arrived(reservation, block, layers, bytes(8 * len(layers)))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(list(self.reservations)))
        del self.reservations[reservation_id]
        self.pool.release(reservation_id)

    # -- leases, holds, pins ----------------------------------------------------------------------

    @rule(keys=keys_drawn, owner=st.sampled_from([ALICE, BOB]), ttl_s=st.integers(1, 4))
    def lease(self, keys: list[BlockKey], owner: int, ttl_s: int) -> None:
        lease = self.pool.lease(owner, keys, self.now_s + ttl_s)
        assert lease.pages == [self.in_dram.get(key) for key in keys]
        places = [self.place(page) for page in lease.pages if page is not None]
        self.leases[lease.lease_id] = Claim(owner, places, self.now_s + ttl_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        del self.leases[lease_id]
        self.pool.end_lease(lease_id)

    @rule(owner=st.sampled_from([ALICE, BOB]))
    def owner_is_gone(self, owner: int) -> None:
        reservations, leases = self.pool.claims_of(owner)
        assert set(reservations) == {r for r, claim in self.reservations.items() if claim.owner == owner}
        assert set(leases) == {lease for lease, claim in self.leases.items() if claim.owner == owner}
        for reservation_id in reservations:
            del self.reservations[reservation_id]
            self.pool.release(reservation_id)
        for lease_id in leases:
            del self.leases[lease_id]
            self.pool.end_lease(lease_id)

    @rule(elapsed_s=st.integers(0, 3))
    def pass_time(self, elapsed_s: int) -> None:
        self.now_s += elapsed_s
        self.pool.expire(self.now_s)
        for claims in (self.leases, self.hard):
            for name in [
                n for n, c in claims.items() if c.deadline_s is not None and c.deadline_s <= self.now_s
            ]:
                del claims[name]
        self.soft = {key: deadline_s for key, deadline_s in self.soft.items() if deadline_s > self.now_s}

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        pages = {page for page, _ in self.relied_on()} | set(self.in_dram.values())
        if pages:
            page = data.draw(st.sampled_from(sorted(pages)))
            self.pool.hold(page)
            self.holds.append(self.place(page))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), used=st.booleans())
    def unhold(self, data: st.DataObject, used: bool) -> None:
        place = data.draw(st.sampled_from(self.holds))
        self.holds.remove(place)
        self.pool.unhold(place[0], used=used)

    @rule(keys=keys_drawn, hard=st.booleans(), ttl_s=st.integers(1, 4))
    def pin(self, keys: list[BlockKey], hard: bool, ttl_s: int) -> None:
        found = [key for key in dict.fromkeys(keys) if key in self.in_dram]
        deadline_s = self.now_s + ttl_s
        if hard and len({*self.hard, *found}) > NUM_PAGES // 2:
            with pytest.raises(PoolError):
                self.pool.pins.add(keys, hard=True, deadline_s=deadline_s)
            return
        assert self.pool.pins.add(keys, hard=hard, deadline_s=deadline_s) == len(found)
        for key in found:
            if not hard and key in self.hard:
                continue
            self.unpinned(key)
            if hard:
                self.hard[key] = Claim(0, [self.place(self.in_dram[key])], deadline_s)
            else:
                self.soft[key] = deadline_s

    @rule(keys=keys_drawn)
    def unpin(self, keys: list[BlockKey]) -> None:
        pinned = {key for key in keys if key in self.hard or key in self.soft}
        assert self.pool.pins.remove(keys) == len(pinned)
        for key in pinned:
            self.unpinned(key)

    # -- blocks that leave by name ----------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), is_damaged=st.booleans())
    def remove(self, key: BlockKey, is_damaged: bool) -> None:
        if is_damaged and key in self.in_dram:
            self.pool.drop(self.in_dram[key])
        else:
            assert self.pool.remove(key) == (key in self.in_dram)
        assert self.pool.find(key) is None
        self.gone.add(key)
        self.unpinned(key)

    # -- the tier below ---------------------------------------------------------------------------

    @precondition(lambda self: self.in_dram)
    @rule(data=st.data())
    def lower_tier_gets(self, data: st.DataObject) -> None:
        self.lower.held.add(data.draw(st.sampled_from(sorted(self.in_dram))))

    @precondition(lambda self: self.lower.held)
    @rule(data=st.data())
    def lower_tier_loses(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.lower.held)))
        self.lower.held.remove(key)
        self.pool.evictor.left_lower_tier(key)

    @rule(is_accepting=st.booleans())
    def lower_tier_changes(self, is_accepting: bool) -> None:
        self.lower.is_accepting = is_accepting

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def make_room(self, num_pages: int) -> None:
        num_free, idle = self.table.count()[PageState.FREE], self.idle()
        has_room = self.pool.evictor.make(num_pages)
        assert has_room == (self.table.count()[PageState.FREE] >= num_pages)
        if not self.lower.is_accepting or idle <= self.lower.held:
            assert has_room == (num_pages <= num_free + len(idle)), "idle blocks were left and no room made"

    @rule(data=st.data())
    def begin_promotion(self, data: st.DataObject) -> None:
        keys = sorted(self.lower.held - set(self.in_dram))
        if not keys:
            return
        used = {page for page, _ in self.relied_on()}
        try:
            promotion = self.pool.begin_promotion(data.draw(st.sampled_from(keys)), 0)
        except PoolFullError:
            assert self.table.count()[PageState.FREE] == 0
            return
        assert promotion.blocks[0].page not in used
        self.promotions[promotion.reservation_id] = promotion

    @precondition(lambda self: self.promotions)
    @rule(data=st.data(), has_come=st.booleans())
    def end_promotion(self, data: st.DataObject, has_come: bool) -> None:
        promotion = self.promotions.pop(data.draw(st.sampled_from(list(self.promotions))))
        if has_come:
            key = promotion.blocks[0].key
            assert key is not None
            self.pool.promoted(promotion, CHECKSUMS, num_uses=3)
            expected = self.in_dram.get(key, promotion.blocks[0].page)
            assert self.pool.find(key) == expected
        self.pool.release(promotion.reservation_id)

    # -- a new life -------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        """Leases, pins and holds are lost; pages that others may still be writing are not given away."""
        for claim in self.reservations.values():
            for page, generation in claim.places:
                writer = self.table._writer[page]
                if self.table.state(page) is PageState.RESERVED and writer:
                    place = (page, generation)
                    self.former.setdefault(PageWriter(writer >> 32, writer & 0xFFFFFFFF), []).append(place)
        for claims in (self.reservations, self.promotions, self.leases, self.hard, self.soft, self.holds):
            claims.clear()
        self.pool = Pool(self.table, policy=self.policy, lower=self.lower)
        for places in self.former.values():
            for page, _ in places:
                assert self.table.state(page) is PageState.QUARANTINED
        assert set(self.former) <= set(self.pool.former_writers)

    @rule(writer=st.sampled_from(list(WRITERS.values())))
    def writer_is_gone(self, writer: PageWriter) -> None:
        self.former.pop(writer, None)
        self.pool.writer_gone(writer)
        assert writer not in self.pool.former_writers

    # -- always -----------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.every_page_is_accounted_for()
        self.what_somebody_relies_on_is_where_it_was()
        self.nothing_was_lost()
        self.counts_are_right()

    def every_page_is_accounted_for(self) -> None:
        assert self.pool.check_integrity() is None
        assert self.pool.orphans() == []

    def what_somebody_relies_on_is_where_it_was(self) -> None:
        for page, generation in self.relied_on():
            assert self.table.generation(page) == generation
            assert self.table.state(page) is not PageState.FREE

    def counts_are_right(self) -> None:
        used = {page for page, _ in self.relied_on()}
        num_former = sum(self.table.state(page) is PageState.QUARANTINED for page in range(NUM_PAGES))
        assert len(used) <= self.pool.num_used_pages <= len(used) + num_former
        assert self.pool.num_reservations == len(self.reservations) + len(self.promotions)
        assert self.pool.num_leases == len(self.leases)
        assert len(self.pool.pins) == len(self.hard) + len(self.soft)

    def nothing_was_lost(self) -> None:
        """Compares with what was in DRAM before the step."""
        now = dict(self.pool.allocator.index)
        lost = self.in_dram.keys() - now.keys() - self.gone
        for key in lost:
            assert key not in self.hard, "a hard pin did not hold"
            assert not self.lower.is_accepting or key in self.lower.held, "a block was lost"
        if lost & self.soft.keys():
            stayed = {key for key in self.idle() if now.get(key) == self.in_dram[key]}
            assert stayed <= self.soft.keys(), "a softly pinned block went before another"
        for key in lost:
            self.unpinned(key)
        self.in_dram, self.gone = now, set()


TestLeasesAgainstModel = LeaseModel.TestCase
TestLeasesAgainstModel.settings = settings(max_examples=120, stateful_step_count=50)
