"""The shelf: index, free pages, users and idle pages of one table, and who is evicted next."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pool.pages import PageState, PageTable, Writer
from kvstore.pool.shelf import Shelf
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey

LRU, LFU, LENGTH_AWARE = EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.LENGTH_AWARE
BATCH = 4
NUM_PAGES = 64 * BATCH
"""so that `BATCH` victims are chosen at a time"""


def key_of(number: int) -> BlockKey:
    return number.to_bytes(16, "big")


def new_shelf(
    num_pages: int = 8,
    policy: EvictionPolicy = LRU,
    on_removed: Callable[[BlockKey], None] = lambda _: None,
) -> Shelf:
    return Shelf(PageTable.in_memory(num_pages, 1), policy, on_removed)


def store(shelf: Shelf, number: int, position: int = 0, num_uses: int = 1) -> int:
    """Seals a block and leaves it idle. Returns its page."""
    (page,) = shelf.take(1)
    shelf.seal(page, key_of(number), position, num_uses)
    shelf.unclaim([page])
    return page


def evict_all(shelf: Shelf) -> list[int]:
    """Pages in the order in which they go."""
    pages = []
    while (page := shelf.coldest()) is not None:
        shelf.evict(page)
        pages.append(page)
    return pages


def warmth(shelf: Shelf, page: int) -> tuple[int, ...]:
    table = shelf.table
    last_use, num_uses = table.last_use(page), int(table.num_uses[page])
    order = {
        LRU: (last_use,),
        LFU: (num_uses, last_use),
        LENGTH_AWARE: (num_uses, -int(table.positions[page]), last_use),
    }
    return (int(shelf.soft_pinned[page]), *order[shelf.policy])


# -- eviction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_blocks_that_nobody_touches_go_exactly_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    shelf, draw = new_shelf(NUM_PAGES, policy), random.Random(0)
    pages = [store(shelf, n, draw.randrange(50), draw.randrange(1, 9)) for n in range(NUM_PAGES)]
    for page in draw.sample(pages, 30):
        shelf.pin_softly(page, True)
    expected = sorted(pages, key=lambda page: warmth(shelf, page))
    assert evict_all(shelf) == expected


class Churn:
    """Random work on a shelf that is full most of the time; looks at every eviction."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.removed: list[BlockKey] = []
        self.shelf = new_shelf(NUM_PAGES, policy, self.removed.append)
        self.draw = random.Random(seed)
        self.num_stored = self.num_evicted = 0
        self.users: list[tuple[int, bool]] = []
        """page of each, and whether he reads it"""
        self.changed: dict[int, int] = {}
        """number of evictions before each idle page got its present place in the order"""

    def run(self, num_steps: int) -> None:
        steps = [self.store] * 6 + [self.use, self.end_use, self.end_use, self.touch, self.pin, self.unseal]
        for _ in range(num_steps):
            self.draw.choice(steps)()
        assert list(self.shelf.problems()) == []

    def used(self) -> set[int]:
        return {page for page, _ in self.users}

    def idle(self) -> list[int]:
        used = self.used()
        return [page for page in self.shelf.index.values() if page not in used]

    def evict(self) -> None:
        page, idle = self.shelf.coldest(), self.idle()
        assert (page is None) == (not idle)
        if page is None:
            return
        assert page in idle
        for other in idle:
            if self.changed[other] <= self.num_evicted - BATCH:
                assert warmth(self.shelf, page) <= warmth(self.shelf, other), "passed over for a whole batch"
        key = self.shelf.table.key(page)
        self.shelf.evict(page)
        assert self.removed[-1] == key
        self.num_evicted += 1

    def store(self) -> None:
        while not self.shelf.num_free:
            num_evicted = self.num_evicted
            self.evict()
            if self.num_evicted == num_evicted:
                return
        self.num_stored += 1
        position, num_uses = self.draw.randrange(9), self.draw.randrange(1, 5)
        self.changed[store(self.shelf, self.num_stored, position, num_uses)] = self.num_evicted

    def use(self) -> None:
        """Somebody reads many blocks, or they are only copied elsewhere."""
        if self.shelf.index:
            pages = self.draw.sample(sorted(self.shelf.index.values()), min(len(self.shelf.index), 20))
            self.shelf.claim(pages)
            is_reader = self.draw.random() < 0.8
            if is_reader:
                for page in pages:
                    self.shelf.table.use(page)
            self.users += [(page, is_reader) for page in pages]

    def end_use(self) -> None:
        """By about half of the readers, or of the others."""
        is_reader = self.draw.random() < 0.5
        users = sorted({user for user in self.users if user[1] == is_reader})
        pages = [page for page, _ in users if self.draw.random() < 0.5]
        for page in pages:
            self.users.remove((page, is_reader))
            self.changed[page] = self.num_evicted
        ended = self.shelf.unclaim(pages, used=is_reader)
        state, used = self.shelf.table.state, self.used()
        assert ended == [page for page in pages if page not in used and state(page) is PageState.QUARANTINED]
        for page in ended:
            self.shelf.free(page)

    def touch(self) -> None:
        if idle := self.idle():
            page = self.draw.choice(idle)
            self.shelf.claim([page])
            self.shelf.unclaim([page], used=False)
            self.changed[page] = self.num_evicted

    def pin(self) -> None:
        if self.shelf.index:
            page = self.draw.choice(sorted(self.shelf.index.values()))
            self.shelf.pin_softly(page, self.draw.random() < 0.5)
            self.changed[page] = self.num_evicted

    def unseal(self) -> None:
        if self.shelf.index:
            key, page = self.draw.choice(sorted(self.shelf.index.items()))
            self.shelf.unseal(page)
            assert self.removed[-1] == key
            if page not in self.used():
                self.shelf.free(page)


@pytest.mark.parametrize("policy", EvictionPolicy)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_under_churn_the_order_is_kept_to_within_one_batch_and_an_idle_page_is_always_found(
    policy: EvictionPolicy, seed: int
) -> None:
    Churn(policy, seed).run(900)


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_many_at_once_is_the_same_as_one_after_the_other(policy: EvictionPolicy) -> None:
    removed: tuple[list[BlockKey], list[BlockKey]] = ([], [])
    ones, many = (new_shelf(NUM_PAGES, policy, heard.append) for heard in removed)
    rng, number = random.Random(1), 0
    for _ in range(60):
        num_blocks = rng.randrange(1, 3 * BATCH)
        for shelf in (ones, many):
            keys = [key_of(number + position) for position in range(num_blocks)]
            if shelf is many:
                shelf.evict_coldest(num_blocks - shelf.num_free)
                pages = shelf.take(num_blocks)
                shelf.seal_all(pages, keys, range(num_blocks))
            else:
                while shelf.num_free < num_blocks and (page := shelf.coldest()) is not None:
                    shelf.evict(page)
                pages = shelf.take(num_blocks)
                for position, (page, key) in enumerate(zip(pages, keys, strict=True)):
                    shelf.seal(page, key, position)
            used = pages[: num_blocks // 2]
            shelf.unclaim(pages)
            shelf.claim(used)
            shelf.unclaim(used)
        number += num_blocks
        assert many.index == ones.index
        assert removed[0] == removed[1]
        assert not list(many.problems())
    assert removed[0]
    many.evict_coldest(2 * NUM_PAGES)
    assert (many.num_free, many.index) == (NUM_PAGES, {})


def test_block_that_is_used_again_after_it_was_chosen_is_spared() -> None:
    shelf = new_shelf(NUM_PAGES)
    pages = [store(shelf, number) for number in range(NUM_PAGES)]
    assert shelf.coldest() == pages[0]
    shelf.claim([pages[1]])
    shelf.unclaim([pages[1]])
    shelf.claim([pages[2]])
    order = evict_all(shelf)
    assert order == [pages[0], *pages[3:], pages[1]]
    assert shelf.is_idle(pages[2]) is False
    shelf.unclaim([pages[2]])
    assert shelf.coldest() == pages[2]


def test_soft_pin_takes_effect_on_a_block_that_was_chosen_already() -> None:
    shelf = new_shelf(NUM_PAGES)
    pages = [store(shelf, number) for number in range(NUM_PAGES)]
    assert shelf.coldest() == pages[0]
    shelf.pin_softly(pages[1], True)
    assert evict_all(shelf) == [pages[0], *pages[2:], pages[1]]


def test_soft_pin_ends_with_its_block() -> None:
    shelf = new_shelf(num_pages=2)
    shelf.pin_softly(store(shelf, 1), True)
    evict_all(shelf)
    old, new = store(shelf, 2), store(shelf, 3)
    assert evict_all(shelf) == [old, new]


def test_coldest_stays_until_it_is_evicted() -> None:
    shelf = new_shelf()
    store(shelf, 1)
    store(shelf, 2)
    assert shelf.coldest() == shelf.coldest()


# -- blocks and users ---------------------------------------------------------------------------------


def test_block_is_reported_once_when_it_leaves_the_index() -> None:
    removed: list[BlockKey] = []
    shelf = new_shelf(on_removed=removed.append)
    evicted, unsealed = store(shelf, 1), store(shelf, 2)
    shelf.evict(evicted)
    shelf.claim([unsealed])
    shelf.unseal(unsealed)
    assert removed == [key_of(1), key_of(2)]
    assert shelf.unclaim([unsealed]) == [unsealed]
    shelf.free(unsealed)
    assert removed == [key_of(1), key_of(2)]
    assert (shelf.index, shelf.num_free) == ({}, 8)


def test_use_that_was_none_leaves_a_block_where_it_was_in_the_order() -> None:
    shelf = new_shelf()
    first, second = store(shelf, 1), store(shelf, 2)
    shelf.claim([first])
    shelf.unclaim([first], used=False)
    assert evict_all(shelf) == [first, second]


def test_use_by_one_of_several_users_counts_even_if_he_is_not_the_last_to_go() -> None:
    shelf = new_shelf()
    first, second = store(shelf, 1), store(shelf, 2)
    shelf.claim([first])  # somebody who only copies it elsewhere
    shelf.claim([first])
    shelf.unclaim([first])
    shelf.unclaim([first], used=False)
    assert evict_all(shelf) == [second, first]


def test_new_life_finds_sealed_blocks_in_their_order_and_what_writers_left() -> None:
    table = PageTable.in_memory(8, 1)
    shelf = Shelf(table, LRU, lambda _: None)
    first, second, third = (store(shelf, number) for number in range(3))
    shelf.claim([first])  # in use when the process dies, and the youngest
    shelf.unclaim([first])
    shelf.claim([second])
    writer = Writer(pid=77, serial=3)
    (written,), (unwritten,) = shelf.take(1, writer), shelf.take(1)
    again = Shelf(table, LRU, lambda _: None)
    assert again.adopted_writers == {written: writer}
    assert table.state(unwritten) is PageState.FREE
    again.claim([written])
    assert list(again.problems()) == []
    assert evict_all(again) == [second, third, first]


def test_number_of_the_last_use_goes_on_in_a_new_life() -> None:
    table = PageTable.in_memory(8, 1)
    old = Shelf(table, LRU, lambda _: None)
    first, second = store(old, 1), store(old, 2)
    shelf = Shelf(table, LRU, lambda _: None)
    shelf.claim([first])
    shelf.unclaim([first])
    third = store(shelf, 3)
    assert evict_all(shelf) == [second, first, third]


def test_damaged_number_of_a_last_use_costs_no_more_than_a_place_in_the_order() -> None:
    table = PageTable.in_memory(8, 1)
    old = Shelf(table, LRU, lambda _: None)
    first, damaged = store(old, 1), store(old, 2)
    table.last_uses[damaged] = (1 << 64) - 1
    shelf = Shelf(table, LRU, lambda _: None)
    third = store(shelf, 3)
    shelf.pin_softly(third, True)
    assert set(evict_all(shelf)[:2]) == {first, damaged}, "only the pinned one stays"


# -- checks -------------------------------------------------------------------------------------------


def a_free_page_that_the_list_lacks(shelf: Shelf) -> None:
    shelf._free.pop()


def less_than_no_users(shelf: Shelf) -> None:
    shelf.num_users[0] = -1


def a_free_page_in_use(shelf: Shelf) -> None:
    shelf.num_users[shelf._free[0]] = 1


def a_sealed_page_without_its_key(shelf: Shelf) -> None:
    del shelf.index[key_of(1)]


def a_key_of_another_page(shelf: Shelf) -> None:
    index = shelf.index
    index[key_of(1)], index[key_of(2)] = index[key_of(2)], index[key_of(1)]


def a_miscounted_idle_page(shelf: Shelf) -> None:
    shelf.num_users[shelf.index[key_of(1)]] += 1


def a_quarantined_page_of_nobody(shelf: Shelf) -> None:
    shelf.unseal(shelf.index[key_of(1)])


def a_reserved_page_of_nobody(shelf: Shelf) -> None:
    shelf.num_users[shelf.take(1)[0]] = 0


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (a_free_page_that_the_list_lacks, "the free list differs"),
        (less_than_no_users, "less than no users"),
        (a_free_page_in_use, "a FREE page is in use"),
        (a_sealed_page_without_its_key, "the index differs"),
        (a_key_of_another_page, "the index differs"),
        (a_miscounted_idle_page, "idle pages is wrong"),
        (a_quarantined_page_of_nobody, "QUARANTINED page is used by nobody"),
        (a_reserved_page_of_nobody, "RESERVED page is used by nobody"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_contradiction_is_reported(damage: Callable[[Shelf], None], complaint: str) -> None:
    shelf = new_shelf()
    store(shelf, 1)
    store(shelf, 2)
    assert list(shelf.problems()) == []
    damage(shelf)
    assert any(complaint in problem for problem in shelf.problems())


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_miscounted_idle_page_does_not_make_the_search_for_one_endless(policy: EvictionPolicy) -> None:
    shelf = new_shelf(policy=policy)
    store(shelf, 1)
    a_miscounted_idle_page(shelf)
    assert shelf.coldest() is None
