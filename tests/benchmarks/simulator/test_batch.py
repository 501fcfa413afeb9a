import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tools.simulator.cluster.batch import Batch, IterationCost, Member, tbt_s

COST = IterationCost(0.02, 1e-8)


def test_many_iterations_take_as_long_as_one_after_the_other() -> None:
    one_by_one_s = sum(COST.iterations_s(1_000_000 + 30 * iteration, 30, 1) for iteration in range(500))
    assert COST.iterations_s(1_000_000, 30, 500) == pytest.approx(one_by_one_s, rel=1e-12)


@given(st.integers(1, 200), st.integers(0, 10**7), st.integers(1, 5000), st.floats(0.01, 0.99))
def test_iterations_begun_by_a_time_are_those_that_end_after_it(
    size: int, num_kv_tokens: int, num_iterations: int, part: float
) -> None:
    ended_s = COST.iterations_s(num_kv_tokens, size, num_iterations - 1) if num_iterations > 1 else 0.0
    iteration_s = COST.iterations_s(num_kv_tokens + size * (num_iterations - 1), size, 1)
    assert COST.iterations_by(num_kv_tokens, size, ended_s + part * iteration_s) == num_iterations


def test_a_batch_does_not_end_a_member_that_has_gone_to_another_one() -> None:
    source, destination, member = Batch(), Batch(), Member(0, 100, 30)
    source.add(member, 0.0)
    source.add(Member(1, 100, 50), 0.0)
    source.remove(member)
    destination.add(member, 0.0)  # its last iteration has the same number in both
    assert source.advance(30, 1.0) == []
    assert destination.advance(30, 1.0) == [member]


@given(st.integers(0, 10**6))
def test_gaps_of_each_member_add_up_to_its_time(seed: int) -> None:
    """Members join late, are preempted, and wait while prompts are computed."""
    rng = random.Random(seed)
    batch, now_s = Batch(), 0.0
    born_s: dict[Member, float] = {}
    lengths: dict[Member, int] = {}
    waiting: list[Member] = []
    ended: dict[Member, float] = {}
    for number in range(12):
        num_left = rng.randrange(1, 30)
        member = Member(number, rng.randrange(1, 1000), num_left, left_s=now_s)
        born_s[member], lengths[member] = now_s, num_left
        waiting.append(member)
        # Time that passes between two runs is a stall for those that are in the batch.
        if batch.size:
            batch.stall(0.25)
        now_s += 0.25
        while waiting and rng.random() < 0.8:
            batch.add(waiting.pop(), now_s)
        if batch.size and rng.random() < 0.3:
            seconds = rng.random()
            batch.stall(seconds)
            now_s += seconds
        if batch.size:
            num_iterations = rng.randrange(1, batch.num_iterations_to_first_end() + 1)
            seconds = COST.iterations_s(batch.num_kv_tokens, batch.size, num_iterations)
            now_s += seconds
            for member in batch.advance(num_iterations, seconds):
                ended[member] = now_s
        if batch.size and rng.random() < 0.3:
            preempted = batch.newest()
            batch.remove(preempted)
            preempted.left_s = now_s
            waiting.append(preempted)
        for member, end_s in ended.items():
            assert sum(num for num, _ in member.gaps) == lengths[member]
            assert sum(num * s for num, s in member.gaps) == pytest.approx(end_s - born_s[member], abs=1e-6)


def test_num_kv_tokens_is_the_sum_over_the_members() -> None:
    batch = Batch()
    members = [Member(number, 100 * number, 10 * number) for number in (1, 2, 3)]
    for member in members:
        batch.add(member, 0.0)
    assert batch.advance(10, 1.0) == [members[0]]
    assert batch.num_kv_tokens == 200 + 300 + 2 * 10
    batch.remove(members[2])
    assert (batch.num_kv_tokens, members[2].num_tokens, members[2].num_left) == (210, 310, 20)
    batch.add(members[2], 1.0)
    assert batch.num_iterations_to_first_end() == 10


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    rng = random.Random(4)
    gaps = [(rng.randrange(1, 9), rng.random()) for _ in range(40)]
    each = sorted((s for num, s in gaps for _ in range(num)), reverse=True)
    num_longest = math.ceil(0.1 * len(each))
    assert tbt_s(gaps) == pytest.approx(sum(each[:num_longest]) / num_longest)
    assert tbt_s([]) is None
