"""The pool's state machine, against a model that knows only what a user of it may observe."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.pool.claims import Block, PageReservation
from kvstore.pool.pages import PageState, PageTable
from kvstore.pool.pool import Pool
from mooncake.errors import PoolError, PoolFullError

NUM_PAGES, NUM_LAYERS = 6, 2
ALL_LAYERS = range(NUM_LAYERS)
KEYS = [bytes([number]) * 16 for number in range(1, 9)]


def new_pool(num_pages: int = NUM_PAGES) -> Pool:
    return Pool(PageTable.in_memory(num_pages, NUM_LAYERS))


def fill(pool: Pool, reservation: PageReservation, block: Block, layers: range = ALL_LAYERS) -> None:
    pool.arrived(reservation, block, layers, bytes(8 * len(layers)))


def store(pool: Pool, *keys: bytes) -> None:
    """Seals `keys` and leaves them unleased."""
    reservation = pool.reserve(0, keys, 0)
    for block in reservation.blocks:
        if not block.found:
            fill(pool, reservation, block)
    pool.release(reservation.reservation_id)


def found(pool: Pool, *keys: bytes) -> list[bool]:
    reservation = pool.reserve(0, keys, 0)
    pool.release(reservation.reservation_id)
    return [block.found for block in reservation.blocks]


def test_block_is_found_only_when_all_layers_have_arrived() -> None:
    pool = new_pool()
    reservation = pool.reserve(1, KEYS[:1], 0)
    fill(pool, reservation, reservation.blocks[0], range(1))
    assert found(pool, KEYS[0]) == [False]
    fill(pool, reservation, reservation.blocks[0], range(1, 2))
    assert found(pool, KEYS[0]) == [True]


def test_first_to_seal_a_key_wins_and_the_other_page_is_freed_at_release() -> None:
    pool = new_pool()
    first, second = pool.reserve(1, KEYS[:1], 0), pool.reserve(2, KEYS[:1], 0)
    fill(pool, second, second.blocks[0])
    fill(pool, first, first.blocks[0])
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


def test_page_of_an_outstanding_write_is_quarantined_until_that_ends() -> None:
    pool = new_pool(num_pages=1)
    reservation = pool.reserve(1, [], 1)
    page, generation = reservation.blocks[0].page, reservation.blocks[0].generation
    pool.hold(page)
    pool.release(reservation.reservation_id)
    assert pool.table.state(page) is PageState.QUARANTINED
    with pytest.raises(PoolFullError):
        pool.reserve(2, [], 1)
    pool.unhold(page)
    assert pool.reserve(2, [], 1).blocks[0].generation == generation + 1


def test_dropped_block_is_not_found_and_its_page_lives_until_its_readers_end() -> None:
    pool = new_pool()
    store(pool, KEYS[0])
    reader = pool.reserve(1, KEYS[:1], 0)
    page = reader.blocks[0].page
    pool.drop(page)
    assert found(pool, KEYS[0]) == [False]
    assert pool.table.state(page) is PageState.QUARANTINED
    pool.release(reader.reservation_id)
    assert pool.table.state(page) is PageState.FREE


@dataclass
class Claim:
    """What the model knows of a reservation: which keys it completed, and its arrived layers."""

    reservation: PageReservation
    arrived: dict[int, int] = field(default_factory=dict)


class PoolModel(RuleBasedStateMachine):
    """Sealed keys in order of last use, claims and holds: enough to foresee every outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable.in_memory(NUM_PAGES, NUM_LAYERS)
        self.pool = Pool(self.table)
        self.sealed: list[bytes] = []  # least recently used first, among the unused ones
        self.page_of: dict[bytes, int] = {}
        self.claims: dict[int, Claim] = {}
        self.held: list[int] = []
        self.issued: set[tuple[int, int]] = set()

    def used_pages(self) -> set[int]:
        return {b.page for c in self.claims.values() for b in c.reservation.blocks} | set(self.held)

    def touch(self, key: bytes) -> None:
        if key in self.sealed:
            self.sealed.remove(key)
            self.sealed.append(key)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True),
        num_private=st.integers(0, 1),
        owner=st.integers(1, 2),
    )
    def reserve(self, keys: list[bytes], num_private: int, owner: int) -> None:
        used, misses = self.used_pages(), [key for key in keys if key not in self.sealed]
        num_fresh = len(misses) + num_private
        evictable = [k for k in self.sealed if self.page_of[k] not in used and k not in keys]
        num_free = NUM_PAGES - len(used | set(self.page_of.values()))
        if num_fresh > num_free + len(evictable):
            with pytest.raises(PoolFullError):
                self.pool.reserve(owner, keys, num_private)
            return
        reservation = self.pool.reserve(owner, keys, num_private)
        for key in evictable[: max(0, num_fresh - num_free)]:
            self.sealed.remove(key)
            del self.page_of[key]
        for wanted, block in zip([*keys, *[None] * num_private], reservation.blocks, strict=True):
            assert block.found == (wanted in self.sealed)
            if block.found:
                assert wanted is not None
                assert block.page == self.page_of[wanted]
            else:
                assert block.page not in used, "a page that somebody uses was given away"
                assert (block.page, block.generation) not in self.issued, "a generation was used twice"
                self.issued.add((block.page, block.generation))
        self.claims[reservation.reservation_id] = Claim(reservation)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(list(self.claims.values())))
        open_blocks = [b for b in claim.reservation.blocks if not self.pool.is_complete(b)]
        if not open_blocks:
            return
        block = data.draw(st.sampled_from(open_blocks))
        layer = data.draw(st.sampled_from([n for n in ALL_LAYERS if not block.arrived >> n & 1]))
        fill(self.pool, claim.reservation, block, range(layer, layer + 1))
        if self.pool.is_complete(block) and block.key is not None and block.key not in self.sealed:
            self.sealed.append(block.key)
            self.page_of[block.key] = block.page

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(list(self.claims))))

    def end(self, reservation_id: int) -> None:
        claim = self.claims.pop(reservation_id)
        self.pool.release(reservation_id)
        self.pool.release(reservation_id)
        for block in reversed(claim.reservation.blocks):
            if block.key is not None and self.page_of.get(block.key) == block.page:
                self.unused(block.key)

    def unused(self, key: bytes) -> None:
        if self.page_of[key] not in self.used_pages():
            self.touch(key)

    @precondition(lambda self: any(c.reservation.blocks for c in self.claims.values()))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        pages = sorted({b.page for c in self.claims.values() for b in c.reservation.blocks})
        page = data.draw(st.sampled_from(pages))
        self.pool.hold(page)
        self.held.append(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.unhold(page)
        for key in [key for key, kept in self.page_of.items() if kept == page]:
            self.unused(key)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.sealed))
        self.pool.drop(self.page_of.pop(key))
        self.sealed.remove(key)

    @rule()
    def restart(self) -> None:
        """Everything but the sealed blocks is lost; those and their order of use are not."""
        used = self.used_pages()
        self.pool = Pool(self.table)
        in_use = [key for key in self.sealed if self.page_of[key] in used]
        self.claims.clear()
        self.held.clear()
        order = sorted(self.sealed, key=lambda key: self.table.last_use(self.page_of[key]))
        assert [k for k in order if k not in in_use] == [k for k in self.sealed if k not in in_use]
        self.sealed = order

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        assert self.pool.check_integrity() is None
        counts = self.table.count()
        assert counts[PageState.SEALED] == len(self.sealed)
        assert counts[PageState.FREE] == NUM_PAGES - len(self.used_pages() | set(self.page_of.values()))


TestPoolAgainstModel = PoolModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40)
