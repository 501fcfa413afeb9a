"""The allocator: index, free pages, users and idle pages of one table, and which page is evicted next."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.pages import PageState, PageTable, PageWriter
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey
from tests.examples import num_examples

LRU, LFU, LENGTH_AWARE = EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.LENGTH_AWARE
BATCH = 4
NUM_PAGES = 64 * BATCH
"""so that `BATCH` victims are chosen at a time"""


def key_of(number: int) -> BlockKey:
    return number.to_bytes(16, "big")


def new_allocator(
    num_pages: int = 8,
    policy: EvictionPolicy = LRU,
    on_removed: Callable[[BlockKey], None] = lambda _: None,
) -> PageAllocator:
    return PageAllocator(PageTable.in_memory(num_pages, 1), policy, on_removed)


def store(allocator: PageAllocator, number: int, position: int = 0, num_uses: int = 1) -> int:
    """Seals a block and leaves it idle. Returns its page."""
    (page,) = allocator.take(1)
    allocator.seal(page, key_of(number), position, num_uses)
    allocator.remove_user([page])
    return page


def evict_all(allocator: PageAllocator) -> list[int]:
    """Pages in the order in which they go."""
    pages = []
    while (page := allocator.coldest()) is not None:
        allocator.evict(page)
        pages.append(page)
    return pages


def warmth(allocator: PageAllocator, page: int) -> tuple[int, ...]:
    table = allocator.table
    last_use, num_uses = table.last_use(page), int(table.num_uses[page])
    order = {
        LRU: (last_use,),
        LFU: (num_uses, last_use),
        LENGTH_AWARE: (num_uses, -int(table.positions[page]), last_use),
    }
    return (int(allocator.soft_pinned[page]), *order[allocator.policy])


# -- eviction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_blocks_that_nobody_touches_go_exactly_in_the_order_of_the_policy(policy: EvictionPolicy) -> None:
    allocator, draw = new_allocator(NUM_PAGES, policy), random.Random(0)
    pages = [store(allocator, n, draw.randrange(50), draw.randrange(1, 9)) for n in range(NUM_PAGES)]
    for page in draw.sample(pages, 30):
        allocator.pin_softly(page, True)
    expected = sorted(pages, key=lambda page: warmth(allocator, page))
    assert evict_all(allocator) == expected


class Churn:
    """Random work on an allocator that is full most of the time; looks at every eviction."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.removed: list[BlockKey] = []
        self.allocator = new_allocator(NUM_PAGES, policy, self.removed.append)
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
        assert list(self.allocator.problems()) == []
        indexed = self.allocator.index.keys()
        assert len(self.removed) == len(set(self.removed)) == self.num_stored - len(indexed), "not told once"

    def used(self) -> set[int]:
        return {page for page, _ in self.users}

    def idle(self) -> list[int]:
        used = self.used()
        return [page for page in self.allocator.index.values() if page not in used]

    def evict(self) -> None:
        page, idle = self.allocator.coldest(), self.idle()
        assert (page is None) == (not idle)
        if page is None:
            return
        assert page in idle
        assert self.allocator.coldest() == page, "another one, though nothing has happened"
        for other in idle:
            if self.changed[other] <= self.num_evicted - BATCH:
                assert warmth(self.allocator, page) <= warmth(self.allocator, other), (
                    "passed over for a whole batch"
                )
        key = self.allocator.table.key(page)
        self.allocator.evict(page)
        assert self.removed[-1] == key
        self.num_evicted += 1

    def store(self) -> None:
        while not self.allocator.num_free:
            num_evicted = self.num_evicted
            self.evict()
            if self.num_evicted == num_evicted:
                return
        self.num_stored += 1
        position, num_uses = self.draw.randrange(9), self.draw.randrange(1, 5)
        self.changed[store(self.allocator, self.num_stored, position, num_uses)] = self.num_evicted

    def use(self) -> None:
        """Somebody reads many blocks, or they are only copied elsewhere."""
        if self.allocator.index:
            pages = self.draw.sample(
                sorted(self.allocator.index.values()), min(len(self.allocator.index), 20)
            )
            self.allocator.add_user(pages)
            is_reader = self.draw.random() < 0.8
            if is_reader:
                for page in pages:
                    self.allocator.table.use(page)
            self.users += [(page, is_reader) for page in pages]

    def end_use(self) -> None:
        """By about half of the readers, or of the others."""
        is_reader = self.draw.random() < 0.5
        users = sorted({user for user in self.users if user[1] == is_reader})
        pages = [page for page, _ in users if self.draw.random() < 0.5]
        for page in pages:
            self.users.remove((page, is_reader))
            self.changed[page] = self.num_evicted
        ended = self.allocator.remove_user(pages, used=is_reader)
        state, used = self.allocator.table.state, self.used()
        assert ended == [page for page in pages if page not in used and state(page) is PageState.QUARANTINED]
        for page in ended:
            self.allocator.free(page)

    def touch(self) -> None:
        if idle := self.idle():
            page = self.draw.choice(idle)
            self.allocator.add_user([page])
            self.allocator.remove_user([page], used=False)
            self.changed[page] = self.num_evicted

    def pin(self) -> None:
        if self.allocator.index:
            page = self.draw.choice(sorted(self.allocator.index.values()))
            self.allocator.pin_softly(page, self.draw.random() < 0.5)
            self.changed[page] = self.num_evicted

    def unseal(self) -> None:
        if self.allocator.index:
            key, page = self.draw.choice(sorted(self.allocator.index.items()))
            self.allocator.unseal(page)
            assert self.removed[-1] == key
            if page not in self.used():
                self.allocator.free(page)


@pytest.mark.parametrize("policy", EvictionPolicy)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=num_examples(15))
def test_under_churn_the_order_is_kept_to_within_one_batch_and_an_idle_page_is_always_found(
    policy: EvictionPolicy, seed: int
) -> None:
    Churn(policy, seed).run(900)


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_many_at_once_is_the_same_as_one_after_the_other(policy: EvictionPolicy) -> None:
    removed: tuple[list[BlockKey], list[BlockKey]] = ([], [])
    ones, many = (new_allocator(NUM_PAGES, policy, heard.append) for heard in removed)
    rng, number = random.Random(1), 0
    for _ in range(60):
        num_blocks = rng.randrange(1, 3 * BATCH)
        for allocator in (ones, many):
            keys = [key_of(number + position) for position in range(num_blocks)]
            if allocator is many:
                allocator.evict_coldest(num_blocks - allocator.num_free)
                pages = allocator.take(num_blocks)
                allocator.seal_all(pages, keys, range(num_blocks))
            else:
                while allocator.num_free < num_blocks and (page := allocator.coldest()) is not None:
                    allocator.evict(page)
                pages = allocator.take(num_blocks)
                for position, (page, key) in enumerate(zip(pages, keys, strict=True)):
                    allocator.seal(page, key, position)
            used = pages[: num_blocks // 2]
            allocator.remove_user(pages)
            allocator.add_user(used)
            allocator.remove_user(used)
        number += num_blocks
        assert many.index == ones.index
        assert removed[0] == removed[1]
        assert not list(many.problems())
    assert removed[0]
    many.evict_coldest(2 * NUM_PAGES)
    assert (many.num_free, many.index) == (NUM_PAGES, {})


def test_block_that_is_used_again_after_it_was_chosen_is_spared() -> None:
    allocator = new_allocator(NUM_PAGES)
    pages = [store(allocator, number) for number in range(NUM_PAGES)]
    assert allocator.coldest() == pages[0]
    allocator.add_user([pages[1]])
    allocator.remove_user([pages[1]])
    allocator.add_user([pages[2]])
    order = evict_all(allocator)
    assert order == [pages[0], *pages[3:], pages[1]]
    assert allocator.is_idle(pages[2]) is False
    allocator.remove_user([pages[2]])
    assert allocator.coldest() == pages[2]


def test_soft_pin_takes_effect_on_a_block_that_was_chosen_already() -> None:
    allocator = new_allocator(NUM_PAGES)
    pages = [store(allocator, number) for number in range(NUM_PAGES)]
    assert allocator.coldest() == pages[0]
    allocator.pin_softly(pages[1], True)
    assert evict_all(allocator) == [pages[0], *pages[2:], pages[1]]


def test_soft_pin_ends_with_its_block() -> None:
    allocator = new_allocator(num_pages=2)
    allocator.pin_softly(store(allocator, 1), True)
    evict_all(allocator)
    old, new = store(allocator, 2), store(allocator, 3)
    assert evict_all(allocator) == [old, new]


# -- blocks and users ---------------------------------------------------------------------------------


def test_use_that_was_none_leaves_a_block_where_it_was_in_the_order() -> None:
    allocator = new_allocator()
    first, second = store(allocator, 1), store(allocator, 2)
    allocator.add_user([first])
    allocator.remove_user([first], used=False)
    assert evict_all(allocator) == [first, second]


def test_use_by_one_of_several_users_counts_even_if_he_is_not_the_last_to_go() -> None:
    allocator = new_allocator()
    first, second = store(allocator, 1), store(allocator, 2)
    allocator.add_user([first])  # somebody who only copies it elsewhere
    allocator.add_user([first])
    allocator.remove_user([first])
    allocator.remove_user([first], used=False)
    assert evict_all(allocator) == [second, first]


def test_new_life_finds_sealed_blocks_in_their_order_and_what_writers_left() -> None:
    table = PageTable.in_memory(8, 1)
    allocator = PageAllocator(table, LRU, lambda _: None)
    first, second, third = (store(allocator, number) for number in range(3))
    allocator.add_user([first])  # in use when the process dies, and the youngest
    allocator.remove_user([first])
    allocator.add_user([second])
    writer = PageWriter(pid=77, serial=3)
    (written,), (unwritten,) = allocator.take(1, writer), allocator.take(1)
    again = PageAllocator(table, LRU, lambda _: None)
    assert again.adopted_writers == {written: writer}
    assert table.state(unwritten) is PageState.FREE
    again.add_user([written])
    assert list(again.problems()) == []
    assert evict_all(again) == [second, third, first]


def test_number_of_the_last_use_goes_on_in_a_new_life() -> None:
    table = PageTable.in_memory(8, 1)
    old = PageAllocator(table, LRU, lambda _: None)
    first, second = store(old, 1), store(old, 2)
    allocator = PageAllocator(table, LRU, lambda _: None)
    allocator.add_user([first])
    allocator.remove_user([first])
    third = store(allocator, 3)
    assert evict_all(allocator) == [second, first, third]


def test_damaged_number_of_a_last_use_costs_no_more_than_a_place_in_the_order() -> None:
    table = PageTable.in_memory(8, 1)
    old = PageAllocator(table, LRU, lambda _: None)
    first, damaged = store(old, 1), store(old, 2)
    table.last_uses[damaged] = (1 << 64) - 1
    allocator = PageAllocator(table, LRU, lambda _: None)
    third = store(allocator, 3)
    allocator.pin_softly(third, True)
    assert set(evict_all(allocator)[:2]) == {first, damaged}, "only the pinned one stays"


# -- checks -------------------------------------------------------------------------------------------


def a_free_page_that_the_list_lacks(allocator: PageAllocator) -> None:
    (page,) = allocator.take(1)
    allocator.remove_user([page])
    allocator.table.free(page)


def less_than_no_users(allocator: PageAllocator) -> None:
    allocator.num_users[0] = -1


def a_free_page_in_use(allocator: PageAllocator) -> None:
    (page,) = allocator.take(1)
    allocator.remove_user([page])
    allocator.free(page)
    allocator.num_users[page] = 1


def a_sealed_page_without_its_key(allocator: PageAllocator) -> None:
    del allocator.index[key_of(1)]


def a_key_of_another_page(allocator: PageAllocator) -> None:
    index = allocator.index
    index[key_of(1)], index[key_of(2)] = index[key_of(2)], index[key_of(1)]


def a_miscounted_idle_page(allocator: PageAllocator) -> None:
    allocator.num_users[allocator.index[key_of(1)]] += 1


def a_quarantined_page_of_nobody(allocator: PageAllocator) -> None:
    allocator.unseal(allocator.index[key_of(1)])


def a_reserved_page_of_nobody(allocator: PageAllocator) -> None:
    allocator.num_users[allocator.take(1)[0]] = 0


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
def test_contradiction_is_reported(damage: Callable[[PageAllocator], None], complaint: str) -> None:
    allocator = new_allocator()
    store(allocator, 1)
    store(allocator, 2)
    assert list(allocator.problems()) == []
    damage(allocator)
    assert any(complaint in problem for problem in allocator.problems())


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_miscounted_idle_page_does_not_make_the_search_for_one_endless(policy: EvictionPolicy) -> None:
    allocator = new_allocator(policy=policy)
    store(allocator, 1)
    a_miscounted_idle_page(allocator)
    assert allocator.coldest() is None
