"""The pool's state machine against a model of what its users rely on.

After every step nothing that a user relies on has been evicted, overwritten or lost, every page is accounted
for, and no page comes twice with one generation.
"""

from dataclasses import dataclass

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
from tests.examples import num_examples
from tests.kvstore.pool.in_memory import ALL_LAYERS, CHECKSUMS, KEYS, NUM_LAYERS, NUM_PAGES, FakeTier

ALICE, BOB = 1, 2
WRITERS = {ALICE: PageWriter(pid=100, serial=1), BOB: PageWriter(pid=100, serial=2)}


@dataclass
class Claim:
    """Pages that somebody relies on, as (page, generation)."""

    owner: int
    places: list[tuple[int, int]]
    deadline_s: float | None = None


keys_drawn = st.lists(st.sampled_from(KEYS), max_size=4)


class PoolModel(RuleBasedStateMachine):
    """Knows which user relies on which page; eviction may take whatever else it likes."""

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
        self.issued: set[tuple[int, int]] = set()
        self.in_dram: dict[BlockKey, int] = {}
        """as of the end of the last step"""
        self.gone: set[BlockKey] = set()
        self.asked_for: set[BlockKey] = set()
        """Blocks that this step reserves: it does not evict those of them that are there."""
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
        self.asked_for = set(keys)
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
            if not block.found:
                assert block.page not in used, "a page that somebody relies on was given away"
                assert (block.page, block.generation) not in self.issued, "a generation came twice"
                self.issued.add((block.page, block.generation))
        places = [(block.page, block.generation) for block in reservation.blocks]
        self.reservations[reservation.reservation_id] = Claim(owner, places)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), layers=st.sampled_from([ALL_LAYERS, range(1), range(1, 2)]))
    def arrive(self, data: st.DataObject, layers: range) -> None:
        reservation = self.pool.reservations[data.draw(st.sampled_from(list(self.reservations)))]
        blocks = [b for b in reservation.blocks if not any(b.arrived >> layer & 1 for layer in layers)]
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.record_arrival(block, layers, bytes(8 * len(layers)))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(list(self.reservations)))
        del self.reservations[reservation_id]
        self.pool.release(reservation_id)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def store(self, keys: list[BlockKey]) -> None:
        """As a put does: there is more to pin, lease and evict than single layers would bring."""
        self.asked_for = set(keys)
        try:
            reservation = self.pool.reserve(ALICE, keys, 0)
        except PoolFullError:
            return
        for block in reservation.blocks:
            if not block.found:
                self.pool.record_arrival(block, ALL_LAYERS, CHECKSUMS)
        self.pool.release(reservation.reservation_id)
        assert self.pool.locate(keys) == [Tier.DRAM] * len(keys)

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
            self.pool.holds.add(page)
            self.holds.append(self.place(page))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), used=st.booleans())
    def unhold(self, data: st.DataObject, used: bool) -> None:
        place = data.draw(st.sampled_from(self.holds))
        self.holds.remove(place)
        self.pool.holds.remove(place[0], used=used)

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

    @rule(keys=keys_drawn, hard=st.booleans())
    def unpin(self, keys: list[BlockKey], hard: bool) -> None:
        pinned = {key for key in keys if key in self.soft or (hard and key in self.hard)}
        assert self.pool.pins.remove(keys, hard=hard) == len(pinned)
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
        has_room = self.pool.evictor.make_room(num_pages)
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
            self.pool.finish_promotion(promotion, CHECKSUMS, num_uses=3)
            expected = self.in_dram.get(key, promotion.blocks[0].page)
            assert self.pool.find(key) == expected
        self.pool.release(promotion.reservation_id)

    # -- a new life -------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        """Leases, pins and holds are lost; pages that others may still be writing are not given away."""
        for claim in self.reservations.values():
            for page, generation in claim.places:
                writer = self.table.writer(page)
                if self.table.state(page) is PageState.RESERVED and writer is not None:
                    self.former.setdefault(writer, []).append((page, generation))
        for claims in (self.reservations, self.promotions, self.leases, self.hard, self.soft, self.holds):
            claims.clear()
        self.pool = Pool(self.table, policy=self.policy, lower=self.lower)
        for places in self.former.values():
            for page, _ in places:
                assert self.table.state(page) is PageState.QUARANTINED
        assert set(self.former) <= set(self.pool.holds.former_writers)

    @rule(writer=st.sampled_from(list(WRITERS.values())))
    def writer_is_gone(self, writer: PageWriter) -> None:
        self.former.pop(writer, None)
        self.pool.holds.writer_gone(writer)
        assert writer not in self.pool.holds.former_writers

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
        assert len(self.pool.reservations) == len(self.reservations) + len(self.promotions)
        assert len(self.pool.leases) == len(self.leases)
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
            assert stayed <= self.soft.keys() | self.asked_for, "a softly pinned block went before another"
        for key in lost:
            self.unpinned(key)
        self.in_dram, self.gone, self.asked_for = now, set(), set()


TestPoolAgainstModel = PoolModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=num_examples(120), stateful_step_count=50)
