"""The rebalancer: which instance changes its role when, and what is noted of it."""

from dataclasses import replace

import pytest

from conductor.elasticity.capacity import Division, DivisionCapacity, Work
from conductor.elasticity.decisions import Change
from conductor.elasticity.demand import OfferedLoad
from conductor.elasticity.moves.batches import InstanceBatch, Resident
from conductor.elasticity.rebalancer import Member, Rebalancer, State
from conductor.performance.model import DecodeCapacity
from mooncake.messages.costs import Costs
from mooncake.messages.workers import InstanceState, Role

COSTS = Costs(0.01, 0.0, 1e-6)
CAPACITY = DecodeCapacity(COSTS, 64, 1e6, 0.0265)
"""A batch of 15 requests with prompts of 1,000 tokens, so 600 tokens/s."""


def load_of(prefill: float, decode: float, window_s: float = 20.0, num_requests: float = 1.0) -> OfferedLoad:
    """A load that takes so many instances of each stage."""
    tokens_per_s = CAPACITY.tokens_per_s(OfferedLoad(1.0, 0.0, 0.0, 1000.0, 100.0, 1.0).mean_kv_tokens)
    return OfferedLoad(num_requests, prefill, decode * tokens_per_s, 1000.0, 100.0, window_s)


def batch(name: str, num_requests: int = 2) -> InstanceBatch:
    residents = tuple(Resident(f"{name}-{n}", 1000, 10, 2000, 0.0265) for n in range(num_requests))
    return InstanceBatch(name, residents, COSTS, 64, 10**6, 10**6, 10**6)


def state(
    num_prefill: int, num_decode: int, load: OfferedLoad, *, num_requests: int = 2, changed: int = 0
) -> State:
    prefills = [
        Member(f"p{n}", Role.PREFILL, InstanceState.SERVING, True, None, 0.1 * n) for n in range(num_prefill)
    ]
    decodes = [
        Member(f"d{n}", Role.DECODE, InstanceState.SERVING, True, None, 0.0, batch(f"d{n}", num_requests))
        for n in range(num_decode)
    ]
    return State([*prefills, *decodes], load, changed, CAPACITY, 5.0, False, 1000, 0)


def test_work_is_counted_in_instances() -> None:
    able = DivisionCapacity(load_of(1.5, 0.5), CAPACITY)
    assert able.work == pytest.approx(Work(1.5, 0.5))
    assert able.strain(Division(2, 2)) == pytest.approx((0.75, 0.25))


def served(capacity: DecodeCapacity, *, has_inlining: bool) -> float:
    return DivisionCapacity(load_of(3.0, 0.5), capacity, has_inlining).strain(Division(1, 3)).served


def test_inlining_lets_decode_instances_take_what_is_too_much_for_prefill_within_the_tbt_slo() -> None:
    lenient, strict = replace(CAPACITY, tbt_slo_s=0.2), replace(CAPACITY, least_chunk_s=0.01)
    assert served(lenient, has_inlining=True) > served(lenient, has_inlining=False)
    assert served(strict, has_inlining=True) == served(strict, has_inlining=False)


def test_a_stage_that_is_short_gets_an_instance() -> None:
    change = Rebalancer().decide(state(2, 2, load_of(0.4, 2.6)), 10.0)
    assert change is not None
    assert (change.instance, change.before, change.after) == ("p0", Role.PREFILL, Role.DECODE)
    assert change.served_after > change.served_before
    assert "2.60 for decode" in change.why


def test_nothing_changes_while_both_stages_have_enough() -> None:
    assert Rebalancer().decide(state(2, 2, load_of(1.4, 1.4)), 10.0) is None


def test_nothing_changes_where_a_switch_would_only_move_the_shortage() -> None:
    assert Rebalancer().decide(state(2, 2, load_of(2.4, 2.3)), 10.0) is None


def test_the_last_instance_of_a_stage_stays() -> None:
    assert Rebalancer().decide(state(1, 3, load_of(0.1, 3.5)), 10.0) is None


def test_an_instance_that_may_not_change_stays() -> None:
    of = state(2, 2, load_of(0.4, 2.6))
    fixed = of._replace(members=[member._replace(may_change=False) for member in of.members])
    assert Rebalancer().decide(fixed, 10.0) is None


def test_no_decode_instance_is_given_away_whose_requests_fit_nowhere_within_their_slo() -> None:
    short_of_prefill = load_of(2.8, 0.5)
    assert Rebalancer().decide(state(2, 2, short_of_prefill, num_requests=4), 10.0) is not None
    assert Rebalancer().decide(state(2, 2, short_of_prefill, num_requests=12), 10.0) is None


def test_no_prefill_instance_is_given_away_while_queues_are_long() -> None:
    of = state(2, 2, load_of(0.4, 2.6))
    queued = of._replace(members=[member._replace(queue_s=2.0) for member in of.members])
    assert Rebalancer().decide(queued, 10.0) is None


def test_a_load_that_has_just_changed_is_watched_first() -> None:
    assert Rebalancer().decide(state(2, 2, load_of(0.4, 2.6, window_s=1.0)), 10.0) is None


def test_nothing_changes_for_a_burst_that_is_over() -> None:
    burst = load_of(3.8, 0.5, window_s=4.0, num_requests=4.0)
    assert Rebalancer().decide(state(1, 2, burst, num_requests=1), 10.0) is not None
    assert Rebalancer().decide(state(1, 2, burst._replace(was_burst=True), num_requests=1), 10.0) is None


def decided(rebalancer: Rebalancer, of: State, now_s: float) -> Change:
    change = rebalancer.decide(of, now_s)
    assert change is not None
    return change


def switching(of: State, name: str) -> State:
    """The cluster while an instance changes its role."""
    members = [
        member._replace(state=InstanceState.SWITCHING) if member.name == name else member
        for member in of.members
    ]
    return of._replace(members=members)


def done(of: State, change: Change) -> State:
    """The cluster after a change of a role; the instance has requests by then."""
    members = [
        member._replace(role=change.after, batch=batch(member.name))
        if member.name == change.instance
        else member
        for member in of.members
    ]
    return of._replace(members=members)


def test_nothing_is_decided_while_a_role_is_changed_whoever_has_ordered_that() -> None:
    assert Rebalancer().decide(switching(state(3, 1, load_of(0.4, 3.0)), "p0"), 10.0) is None


def test_a_change_that_was_undone_is_over() -> None:
    rebalancer, of = Rebalancer(), state(2, 2, load_of(0.4, 2.6))
    decided(rebalancer, of, 10.0)
    rebalancer.decide(of._replace(load=None), 12.0)  # the instance serves in its old role
    outcome = rebalancer.decisions[0].outcome
    assert outcome is not None
    assert outcome.note == "it was undone"


def test_an_instance_whose_change_was_undone_is_not_chosen_again_at_once() -> None:
    rebalancer, of = Rebalancer(), state(2, 2, load_of(0.4, 2.6, window_s=60.0))
    assert decided(rebalancer, of, 10.0).instance == "p0"
    assert rebalancer.decide(switching(of, "p0"), 12.0) is None
    assert decided(rebalancer, of, 40.0).instance == "p1"
    rebalancer.refused("it drains")
    another = of._replace(load=load_of(0.6, 4.5, window_s=60.0))
    assert rebalancer.decide(another, 50.0) is None
    assert decided(rebalancer, another, 80.0).instance == "p0"


def test_a_change_is_not_taken_back_while_the_load_is_the_same() -> None:
    rebalancer = Rebalancer()
    decided(rebalancer, state(2, 2, load_of(0.75, 2.2)), 10.0)
    later = state(1, 3, load_of(1.1, 1.6))  # much the same, and prefill looks short now
    members = [member._replace(name="p0") if member.name == "d2" else member for member in later.members]
    assert rebalancer.decide(later._replace(members=members), 20.0) is None


def test_a_changed_load_allows_two_changes() -> None:
    rebalancer, num_changes = Rebalancer(), 0
    for now_s, division in ((10.0, (5, 1)), (20.0, (4, 2)), (30.0, (3, 3)), (40.0, (3, 3))):
        of = state(*division, load_of(0.3, 4.5), num_requests=1)
        change = rebalancer.decide(of, now_s)
        if change is not None:
            num_changes += 1
            rebalancer.decide(done(of, change)._replace(load=None), now_s + 4.0)
    assert num_changes == 2
    decided(rebalancer, state(3, 3, load_of(4.5, 0.3), num_requests=1, changed=1), 50.0)


def test_a_decision_says_what_came_of_it() -> None:
    rebalancer, of = Rebalancer(), state(2, 2, load_of(0.4, 2.6))
    for now_s in (0.0, 5.0):
        rebalancer.decide(
            of._replace(load=None, num_arrived=int(10 * now_s), num_rejected=int(4 * now_s)), now_s
        )
    change = decided(rebalancer, of._replace(num_arrived=100, num_rejected=40), 10.0)
    after = done(of, change)._replace(load=None)
    for now_s in (12.0, 20.0, 30.0):
        rebalancer.decide(after._replace(num_arrived=int(10 * now_s), num_rejected=40), now_s)
    (decision,) = rebalancer.decisions
    assert decision.done_s == 12.0
    assert decision.outcome is not None
    assert decision.outcome.took_s == 2.0
    assert decision.accepted_before == pytest.approx(0.6)
    assert decision.outcome.accepted_after == 1.0


def test_a_change_of_an_instance_that_has_gone_is_over() -> None:
    rebalancer, of = Rebalancer(), state(2, 2, load_of(0.4, 2.6))
    change = decided(rebalancer, of, 10.0)
    left = [member for member in of.members if member.name != change.instance]
    rebalancer.decide(of._replace(members=left), 12.0)
    outcome = rebalancer.decisions[0].outcome
    assert outcome is not None
    assert "gone" in outcome.note


def test_a_change_that_could_not_begin_is_noted() -> None:
    rebalancer = Rebalancer()
    decided(rebalancer, state(2, 2, load_of(0.4, 2.6)), 10.0)
    rebalancer.refused("it drains")
    assert rebalancer.decisions[0].outcome is not None


def test_a_switch_that_does_not_pay_is_not_made() -> None:
    """The gain is small, and the only switch so far has taken long."""
    small_gain = state(2, 2, load_of(0.4, 1.8))
    assert Rebalancer().decide(small_gain, 10.0) is not None
    rebalancer, of = Rebalancer(), state(2, 2, load_of(0.4, 2.6))
    change = decided(rebalancer, of, 10.0)
    rebalancer.decide(switching(of, change.instance), 30.0)
    rebalancer.decide(done(of, change)._replace(load=None), 38.0)
    assert rebalancer.decide(small_gain, 40.0) is None


def test_autoscalers_are_told_how_many_instances_the_load_needs() -> None:
    rebalancer = Rebalancer()
    rebalancer.decide(state(2, 2, load_of(3.5, 7.0)), 10.0)
    assert rebalancer.desired == {Role.PREFILL: 5, Role.DECODE: 10}
    burst = load_of(9.0, 9.0, window_s=4.0)._replace(was_burst=True)
    for of in (burst, burst._replace(was_burst=False, window_s=1.0)):
        rebalancer.decide(state(2, 2, of), 20.0)
        assert rebalancer.desired == {Role.PREFILL: 5, Role.DECODE: 10}


def test_short_bursts_change_nothing() -> None:
    rebalancer = Rebalancer()
    for number, now_s in enumerate((0.0, 10.0, 60.0, 70.0, 120.0), 1):  # the load changes, and is watched
        assert rebalancer.decide(state(2, 2, load_of(0.4, 2.6, window_s=0.0), changed=number), now_s) is None
    burst = state(2, 2, load_of(0.4, 2.6, window_s=4.0), changed=5)
    assert rebalancer.decide(burst, 124.0) is None
    lasting = burst._replace(load=load_of(0.4, 2.6, window_s=20.0))
    assert rebalancer.decide(lasting, 140.0) is not None


def test_bursts_that_come_again_decide_the_division_of_the_time_between_them() -> None:
    rebalancer = Rebalancer()
    burst, between = load_of(7.0, 1.3, 9.0, num_requests=16.0), load_of(0.4, 1.1, 20.0, num_requests=4.0)
    for number, load, now_s in (
        (1, burst, 0.0),
        (1, burst, 9.0),
        (2, between, 10.0),
        (2, between, 59.0),
        (3, burst, 60.0),
        (3, burst, 69.0),
        (4, between, 70.0),
    ):
        watched = state(2, 2, load, changed=number)
        assert rebalancer.decide(switching(watched, "p0"), now_s) is None
    # The time between is served by all divisions, and bursts best by many prefill instances.
    assert rebalancer.decide(state(2, 2, between, changed=4), 90.0) is None
    assert decided(rebalancer, state(1, 3, between, changed=4), 92.0).after is Role.PREFILL


def test_a_second_change_waits_while_nobody_knows_whether_loads_last() -> None:
    rebalancer, new = Rebalancer(), load_of(0.3, 4.5, window_s=12.0)
    of = state(5, 1, new, num_requests=1)
    change = decided(rebalancer, of, 10.0)
    assert rebalancer.decide(done(of, change), 14.0) is None
    later = done(of, change)._replace(load=load_of(0.3, 4.5, window_s=16.0))
    assert rebalancer.decide(later, 24.0) is not None


def test_a_change_may_be_taken_back_once_instances_have_joined_and_stayed() -> None:
    rebalancer = Rebalancer()
    of = state(2, 1, load_of(0.75, 1.2), num_requests=1)
    change = decided(rebalancer, of, 10.0)
    assert change.after is Role.DECODE
    before = done(of, change)._replace(load=load_of(0.95, 1.2))
    assert rebalancer.decide(before, 14.0) is None
    joined = [
        *before.members,
        Member("d1", Role.DECODE, InstanceState.SERVING, True, None, 0.0, batch("d1", 1)),
    ]
    of = before._replace(members=joined)
    assert rebalancer.decide(of, 16.0) is None
    assert rebalancer.decide(before, 20.0) is None  # it restarts
    assert rebalancer.decide(of, 22.0) is None
    assert decided(rebalancer, of, 40.0).after is Role.PREFILL
