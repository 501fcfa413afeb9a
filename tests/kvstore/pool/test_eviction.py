"""The order of eviction: each policy against a sort in plain Python."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool.eviction import first_victims
from kvstore.pool.pages import PageTable
from mooncake.config.policies import EvictionPolicy

LRU, LFU, LENGTH_AWARE = EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.LENGTH_AWARE


@dataclass(frozen=True)
class Page:
    last_use: int = 1
    num_uses: int = 1
    position: int = 0
    is_soft: bool = False
    is_candidate: bool = True


ORDERS: dict[EvictionPolicy, Callable[[Page], tuple[int, ...]]] = {
    LRU: lambda page: (page.is_soft, page.last_use),
    LFU: lambda page: (page.is_soft, page.num_uses, page.last_use),
    LENGTH_AWARE: lambda page: (page.is_soft, page.num_uses, -page.position, page.last_use),
}


def order(policy: EvictionPolicy, pages: list[Page], num_pages: int | None = None) -> list[Page]:
    """The first `num_pages` (or all) of the candidates among `pages` to go."""
    table = PageTable.in_memory(len(pages), 1)
    table.last_uses[:] = [page.last_use for page in pages]
    table.num_uses[:] = [page.num_uses for page in pages]
    table.positions[:] = [page.position for page in pages]
    candidates = np.flatnonzero([page.is_candidate for page in pages])
    is_soft = np.asarray([pages[number].is_soft for number in candidates], np.bool_)
    numbers = first_victims(
        policy, table, candidates, is_soft, len(pages) if num_pages is None else num_pages
    )
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(candidates.tolist())
    return [pages[number] for number in numbers]


# Few values, so that there are ties.
pages_drawn = st.lists(
    st.builds(
        Page,
        last_use=st.integers(1, 9) | st.integers(1, 1 << 31),
        num_uses=st.integers(1, 3) | st.integers(1, 2000),
        position=st.integers(0, 3) | st.integers(0, 1_000_000),
        is_soft=st.booleans(),
        is_candidate=st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("policy", EvictionPolicy)
@given(pages=pages_drawn, num_pages=st.integers(1, 45))
def test_order_is_that_of_a_sort(policy: EvictionPolicy, pages: list[Page], num_pages: int) -> None:
    if not any(page.is_candidate for page in pages):
        return
    expected = sorted(map(ORDERS[policy], (page for page in pages if page.is_candidate)))
    assert list(map(ORDERS[policy], order(policy, pages, num_pages))) == expected[:num_pages]


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_any_values_give_an_order_and_soft_pins_stay_last(policy: EvictionPolicy) -> None:
    most = (1 << 32) - 1
    plain = [Page(), Page((1 << 63) - 1, most, most), Page((1 << 63) - 1, most, 0), Page(1, most, most)]
    soft = [Page(page.last_use, page.num_uses, page.position, is_soft=True) for page in plain]
    ordered = order(policy, [*soft, *plain])
    assert [page.is_soft for page in ordered] == [False] * 4 + [True] * 4
    assert set(ordered) == {*soft, *plain}


def test_huge_values_are_taken_for_equal_but_never_for_small() -> None:
    most = (1 << 32) - 1
    long_ago, lately = Page(last_use=1, num_uses=3), Page(last_use=1 << 50, num_uses=3)
    for policy in (LFU, LENGTH_AWARE):
        assert order(policy, [lately, long_ago]) == [long_ago, lately]
        once, always = Page(last_use=1 << 50, num_uses=1), Page(last_use=1, num_uses=most)
        assert order(policy, [always, once]) == [once, always]
    near, far = Page(last_use=1 << 50, position=most), Page(last_use=1, position=most - 1)
    assert order(LENGTH_AWARE, [near, far]) == [far, near], "both are as far as it counts"
    first = Page(last_use=1, position=0)
    assert order(LENGTH_AWARE, [first, near]) == [near, first]


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_order_does_not_depend_on_how_long_the_pool_has_been_in_use(policy: EvictionPolicy) -> None:
    pages = [Page(last_use=(1 << 50) + n) for n in range(10)]
    assert order(policy, pages[::-1]) == pages


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_few_are_chosen_from_many(policy: EvictionPolicy) -> None:
    draw = random.Random(0)
    pages = [Page(draw.randrange(10_000), draw.randrange(1, 9), draw.randrange(99)) for _ in range(5000)]
    expected = sorted(map(ORDERS[policy], pages))[:300]
    assert list(map(ORDERS[policy], order(policy, pages, 300))) == expected


def test_choosing_does_not_change_the_table() -> None:
    table = PageTable.in_memory(4, 1)
    table.last_uses[:] = [4, 3, 2, 1]
    for policy in EvictionPolicy:
        first_victims(policy, table, np.arange(4), np.ones(4, np.bool_), 2)
        assert table.last_uses.tolist() == [4, 3, 2, 1]
