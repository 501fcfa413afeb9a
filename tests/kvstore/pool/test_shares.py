"""Tenants' shares of a pool: whose blocks go when pages are wanted."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pool.pages import PageTable
from kvstore.pool.pool import Pool
from kvstore.pool.shares import ACTIVE_S, PROTECTED
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey
from tests.kvstore.pool.in_memory import new_pool, store

NUM_PAGES = 64
TENANTS = ("a", "b", "c", "d")


def key(tenant: str, number: int) -> BlockKey:
    return f"{tenant}{number:015d}".encode()


def held(pool: Pool) -> Counter[str]:
    """The blocks of each tenant that the pool has."""
    return Counter(chr(name[0]) for name in pool.allocator.index)


class Prompt(NamedTuple):
    tenant: str
    first: int
    num_blocks: int


PROMPTS = st.lists(
    st.builds(Prompt, st.sampled_from(TENANTS), st.integers(0, 200), st.integers(1, 6)), max_size=150
)


@settings(max_examples=60)
@given(prompts=PROMPTS, policy=st.sampled_from(EvictionPolicy))
def test_nobody_loses_blocks_within_its_share_to_others(
    prompts: list[Prompt], policy: EvictionPolicy
) -> None:
    pool = Pool(PageTable.in_memory(NUM_PAGES, 2), policy=policy)
    seen = set[str]()
    for tenant, first, num_blocks in prompts:
        before = held(pool)
        store(pool, *(key(tenant, number) for number in range(first, first + num_blocks)), tenant=tenant)
        seen.add(tenant)
        after, share = held(pool), int(PROTECTED * NUM_PAGES / len(seen))
        for other in seen - {tenant}:
            assert after[other] >= min(before[other], share)
        assert after[tenant] >= num_blocks
        assert pool.check_integrity() is None
        owned = {name: pool.allocator.shares.num_pages_of(name) for name in seen}
        assert all(owned[name] >= after[name] for name in seen)


def test_a_flood_leaves_a_small_tenant_what_it_has() -> None:
    pool = new_pool(NUM_PAGES)
    for number in range(20):
        store(pool, key("a", number), tenant="a")
    for number in range(500):
        store(pool, key("b", number), tenant="b")
    assert held(pool) == {"a": 20, "b": 44}
    for number in range(500):
        store(pool, key("a", number), tenant="a")
    assert held(pool)["b"] == 24  # three quarters of a half


def test_without_other_tenants_the_whole_pool_is_one_tenants() -> None:
    pool = new_pool(NUM_PAGES)
    for number in range(100):
        store(pool, key("a", number), tenant="a")
    assert held(pool) == {"a": NUM_PAGES}


def test_who_uses_nothing_for_a_while_is_not_protected_and_comes_back() -> None:
    pool = new_pool(NUM_PAGES)
    for tenant in "abc":
        for number in range(20):
            store(pool, key(tenant, number), tenant=tenant)
    pool.expire(ACTIVE_S + 1.0)
    for number in range(20):
        store(pool, key("a", number), tenant="a")
        store(pool, key("b", number), tenant="b")
    for number in range(500):
        store(pool, key("b", number), tenant="b")
    assert held(pool) == {"a": 20, "b": 44}, "the others' blocks are gone"
    for number in range(20):
        store(pool, key("c", number), tenant="c")
    assert held(pool)["c"] == 16 + 4


def test_blocks_of_nobody_become_the_first_users() -> None:
    """As after a restart of the process."""
    pool = new_pool(NUM_PAGES)
    for number in range(30):
        store(pool, key("a", number))
    store(pool, *(key("a", number) for number in range(10, 30)), tenant="a")
    for number in range(500):
        store(pool, key("b", number), tenant="b")
    assert sorted(name for name in pool.allocator.index if name[0] == ord("a")) == [
        key("a", number) for number in range(10, 30)
    ]


def test_pinned_blocks_stay_whatever_share_their_tenant_has() -> None:
    pool = new_pool(NUM_PAGES)
    mine = [key("a", number) for number in range(50)]
    store(pool, *mine, tenant="a")
    assert pool.pins.add(mine, hard=False, deadline_s=1e9) == 50
    for number in range(500):
        store(pool, key("b", number), tenant="b")
    assert held(pool) == {"a": 50, "b": 14}


def test_what_runs_goes_before_shares() -> None:
    pool = new_pool(NUM_PAGES)
    for number in range(20):
        store(pool, key("a", number), tenant="a")
    reservation = pool.reserve(1, [key("b", number) for number in range(60)], 0, tenant="b")
    assert len(reservation.blocks) == 60
    assert held(pool)["a"] == 4


def test_renewed_pages_are_their_tenants() -> None:
    """Also while a transfer may still write the old ones."""
    pool = new_pool(8)
    reservation = pool.reserve(1, [key("a", 0), key("a", 1)], 0, tenant="a")
    old_pages = [block.page for block in reservation.blocks]
    for page in old_pages:
        pool.holds.add(page)
    pool.renew_pages(reservation, reservation.blocks)
    new_pages = [block.page for block in reservation.blocks]
    assert not set(new_pages) & set(old_pages)
    tenants_of = pool.allocator.shares.tenants_of
    assert tenants_of(np.asarray(new_pages)).tolist() == [pool.allocator.shares.enter("a")] * 2
    assert pool.allocator.shares.num_pages_of("a") == 2, "the old ones are nobody's"
    pool.release(reservation.reservation_id)
    for page in old_pages:
        pool.holds.remove(page)
    assert pool.check_integrity() is None


def test_names_are_forgotten_with_their_blocks() -> None:
    pool = new_pool(8)
    for number in range(300):
        pool.expire(number * (ACTIVE_S + 1))
        store(pool, number.to_bytes(16, "big"), tenant=f"tenant-{number}")
    assert len(pool.allocator.shares._numbers) <= 9
    assert pool.allocator.shares.num_pages_of("tenant-299") == 1
