"""The steps of a request, refused and failed attempts; `docs/request-path.md` is the order checked here."""

import msgspec
import pytest

from conductor.effects import Effect
from conductor.settings import Limits, PolicySettings
from mooncake.bus.zeromq import peer_identity
from mooncake.config.policies import Overload
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Cancel,
    Continue,
    Ended,
    Failed,
    Interrupted,
    Rejected,
    Submit,
)
from mooncake.messages.migration import ModulesPlace
from mooncake.messages.pools import Grant, GrantedPage, PoolShard, PrefixSource
from mooncake.messages.requests import FinishReason, TokenLogprobs
from mooncake.messages.workers import (
    Abort,
    Decode,
    DecodeRefused,
    Finished,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    Retire,
    Role,
    WorkFailed,
)
from tests.conductor.small_cluster import (
    B0,
    D0,
    D1,
    FRONT,
    GRANT,
    HEARTBEAT,
    LAYOUT,
    P0,
    TBT_SLO_S,
    address,
    coupled_conductor,
    new_conductor,
    ref,
    registration,
    rejections_when_time_passes,
    request,
    two_decode_instances,
)


def test_a_request_that_an_instance_refuses_is_not_tried_again() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    reason, param = "logit_bias is not served", "logit_bias"
    refusal = WorkFailed(ref(), reason, retryable=False, is_refused=True, param=param)
    effects = conductor.handle(D0, refusal, 1.1)
    assert Effect(FRONT, Failed("r", reason, is_refused=True, param=param)) in effects
    assert not any(isinstance(effect.message, Reserve | Prefill) for effect in effects)


def test_prefill_is_told_how_much_time_is_left() -> None:
    conductor = new_conductor(Limits(ttft_slo_s=4.0))
    conductor.handle(FRONT, Submit(request()), 1.0)
    (effect,) = conductor.handle(D0, Reserved(ref(), GRANT), 1.5)
    assert effect.message == Prefill(ref(), request(), GRANT, time_left_s=3.5)


def test_time_runs_on_when_a_request_is_placed_again() -> None:
    conductor = new_conductor(Limits(ttft_slo_s=4.0))
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, WorkFailed(ref(), "no", retryable=True), 3.0)
    (effect,) = conductor.handle(D0, Reserved(ref(2), GRANT), 6.0)
    assert effect.message == Prefill(ref(2), request(), GRANT, time_left_s=-1.0)


def test_a_request_takes_the_steps_of_the_request_path() -> None:
    conductor, order = new_conductor(), request()
    assert conductor.handle(FRONT, Submit(order), 1.0) == [Effect(D0, Reserve(ref(), order))]
    assert conductor.handle(D0, Reserved(ref(), GRANT), 1.0) == [Effect(P0, Prefill(ref(), order, GRANT))]
    first = TokenLogprobs(-0.5, [42], [-0.5])
    prefilled = Prefilled(ref(), 42, 4, first)
    assert conductor.handle(P0, prefilled, 1.0) == [Effect(D0, Decode(ref(), 42, 4, first))]
    finished = conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 1.0)
    assert finished == [Effect(FRONT, Ended("r", 3))]
    assert conductor.num_open == 0
    assert all(not instance.requests for instance in conductor.instances)


@pytest.mark.parametrize(
    ("prefill_cores", "decode_cores", "host", "expected"),
    [
        ({0, 1}, {1, 2}, "host", True),
        ({0, 1}, {2, 3}, "host", False),
        ({0, 1}, {0, 1}, "another host", False),
        ({0, 1}, set(), "host", False),
    ],
)
def test_decode_is_told_whether_prefill_shares_its_cores(
    prefill_cores: set[int], decode_cores: set[int], host: str, expected: bool
) -> None:
    conductor = new_conductor()
    for name, role, cores in (("p0", Role.PREFILL, prefill_cores), ("d0", Role.DECODE, decode_cores)):
        on = msgspec.structs.replace(address(name), host_id=host if name == "d0" else "host")
        life = msgspec.structs.replace(
            registration(name, role, 2), shards=(PoolShard(on, LAYOUT),), idle_cores=frozenset(cores)
        )
        conductor.handle(peer_identity(name, 2), life, 0.5)
    [effect] = conductor.handle(FRONT, Submit(request()), 1.0)
    assert effect.message == Reserve(ref(), request(), shares_cores=expected)


def test_an_instance_that_inlines_a_prompt_gets_one_order() -> None:
    conductor, order = coupled_conductor(), request()
    assert conductor.handle(FRONT, Submit(order), 1.0) == [
        Effect(B0, Reserve(ref(), order, None, shares_cores=False, inline=True))
    ]
    assert conductor.handle(B0, Reserved(ref(), GRANT), 1.0) == []
    assert conductor.handle(B0, Prefilled(ref(), 3, 0), 2.0) == []
    instance = conductor.instances.get("b0")
    assert instance is not None
    assert instance.num_assigned_tokens == 9
    finished = conductor.handle(B0, Finished(ref(), FinishReason.STOP, 3), 3.0)
    assert finished == [Effect(FRONT, Ended("r", 3))]
    assert instance.num_assigned_tokens == 0


def test_the_front_is_asked_how_far_an_inlined_request_has_come_before_its_next_attempt() -> None:
    conductor, order = coupled_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(B0, Reserved(ref(), GRANT), 1.0)
    effects = conductor.handle(B0, WorkFailed(ref(), "damaged", True), 2.0)
    assert effects == [Effect(B0, Abort(ref())), Effect(FRONT, Interrupted("r"))]
    [again] = conductor.handle(FRONT, Continue(order), 2.0)
    assert again == Effect(B0, Reserve(ref(2), order, None, may_refuse=False, inline=True))


@pytest.mark.parametrize(("missing", "num_held"), [([2], 2), ([1, 2], 1), ([0, 2], 0), ([], 2)])
def test_prefill_may_fetch_the_first_blocks_that_decode_does_not_lack(
    missing: list[int], num_held: int
) -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)  # two full blocks and a partial one
    grant = Grant(1, address("d0"), [GrantedPage(index, 5 + index, 1) for index in missing])
    (effect,) = conductor.handle(D0, Reserved(ref(), grant), 1.0)
    assert isinstance(effect.message, Prefill)
    expected = PrefixSource((PoolShard(address("d0"), LAYOUT),), num_held)
    assert effect.message.prefix_source == (expected if num_held else None)


def test_a_request_that_one_decode_instance_refuses_is_placed_on_another() -> None:
    """Mooncake, section 3: the local scheduler double-checks."""
    conductor, order = two_decode_instances(), request()
    assert conductor.handle(FRONT, Submit(order), 1.0) == [Effect(D0, Reserve(ref(), order, TBT_SLO_S))]
    effects = conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 1.0)
    assert effects == [
        Effect(D0, Abort(ref())),
        Effect(P0, Abort(ref())),
        Effect(D1, Reserve(ref(2), order, TBT_SLO_S)),
    ]


def test_a_request_that_all_decode_instances_refuse_is_rejected_with_a_time_to_retry() -> None:
    conductor = two_decode_instances()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 1.0)
    *aborts, rejected = conductor.handle(D1, DecodeRefused(ref(2), "slower", 2, 0.3), 1.0)
    assert aborts == [Effect(D1, Abort(ref(2))), Effect(P0, Abort(ref(2)))]
    assert rejected == Effect(FRONT, Rejected("r", "double_check", 429, "slower", 1.0))
    assert conductor.num_open == 0
    assert all(not instance.requests for instance in conductor.instances)


def test_a_request_may_be_refused_when_its_prefill_has_ended() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    effects = conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 1.0)
    assert effects[-1] == Effect(D1, Reserve(ref(2), order, TBT_SLO_S))


def test_a_refusal_teaches_the_step_of_a_batch_without_requests_that_wait_for_their_turn() -> None:
    conductor = new_conductor(Limits(tbt_slo_s=TBT_SLO_S, ttft_slo_s=100.0))
    for name in ("r", "s", "t"):
        conductor.handle(FRONT, Submit(request(name)), 1.0)
        conductor.handle(D0, Reserved(ref(1, name), GRANT), 1.0)
        conductor.handle(P0, Prefilled(ref(1, name), 42, 0), 1.0)
    conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 1.0)
    slot = conductor.view.slot_of("d0")
    assert slot is not None
    num_tokens = 2 * len(request().token_ids)
    assert conductor.view.decode_costs.predict_s(slot, 2, num_tokens) == pytest.approx(0.2)


def test_a_request_that_waited_for_its_turn_until_its_first_token_is_due_is_not_placed_elsewhere() -> None:
    limits = Limits(tbt_slo_s=TBT_SLO_S, ttft_slo_s=4.0)
    conductor, order = two_decode_instances(limits), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    [effect] = conductor.handle(P0, Prefilled(ref(), 42, 0), 1.5)
    assert effect == Effect(D0, Decode(ref(), 42, 0, time_left_s=3.5))
    effects = conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 5.0)
    assert effects[-1] == Effect(FRONT, Rejected("r", "double_check", 429, "slow", 1.0))


def test_no_instance_refuses_a_request_whose_tokens_may_have_left() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    conductor.peer_gone(D0, 2.0)
    effects = conductor.handle(FRONT, Continue(order), 2.0)
    assert effects == [Effect(D1, Reserve(ref(2), order, TBT_SLO_S, may_refuse=False, alone=True))]


def test_an_answer_that_has_begun_goes_on_behind_what_the_front_has_of_it() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    assert Effect(FRONT, Interrupted("r")) in conductor.peer_gone(D0, 2.0)
    assert conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 2.0) == []
    assert Effect(FRONT, Interrupted("r")) in conductor.tick(2.5)
    longer = order.continued([42, 43], block_size=4)
    assert conductor.handle(b"front#2", Continue(longer), 3.0) == []
    assert conductor.handle(FRONT, Continue(longer), 3.0) == [
        Effect(D1, Reserve(ref(2), longer, TBT_SLO_S, may_refuse=False, alone=True))
    ]
    assert conductor.handle(FRONT, Continue(longer), 3.0) == []
    conductor.handle(D1, Reserved(ref(2), GRANT), 3.0)
    conductor.handle(P0, Prefilled(ref(2), 44, 0), 3.0)
    effects = conductor.handle(D1, Finished(ref(2), FinishReason.LENGTH, 5), 4.0)
    assert effects == [Effect(FRONT, Ended("r", 5))]


def test_a_begun_request_that_fits_nowhere_any_more_may_be_sent_again() -> None:
    """As when a helper that had some of its pages is lost."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    smaller = msgspec.structs.replace(HEARTBEAT, modules=ModulesPlace(num_device_pages=2))
    conductor.handle(D0, smaller, 2.0)
    reason = "it needs 3 device pages now, and there are 2"
    assert Effect(FRONT, Interrupted("r")) in conductor.handle(D0, WorkFailed(ref(), reason, True), 2.0)
    [effect] = conductor.handle(FRONT, Continue(request()), 2.0)
    assert effect.message == Failed(
        "r",
        "the prompt has 9 tokens, max_tokens is 5; the KVCache of a decode instance holds at most 2 blocks of"
        " 4 tokens (it needs 3 device pages now, and there are 2)",
        may_retry=True,
    )


def test_a_placed_request_that_fits_nowhere_any_more_may_be_sent_again() -> None:
    """As a begun one, although its client has got nothing yet."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    smaller = msgspec.structs.replace(HEARTBEAT, modules=ModulesPlace(num_device_pages=2))
    conductor.handle(D0, smaller, 2.0)
    *_, effect = conductor.handle(D0, WorkFailed(ref(), "no room", True), 2.0)
    assert effect.message == Failed(
        "r",
        "the prompt has 9 tokens, max_tokens is 5; the KVCache of a decode instance holds at most 2 blocks of"
        " 4 tokens (no room)",
        may_retry=True,
    )


def test_an_interrupted_request_that_is_cancelled_ends() -> None:
    conductor = coupled_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(B0, Reserved(ref(), GRANT), 1.0)
    conductor.peer_gone(B0, 2.0)
    assert conductor.handle(FRONT, Cancel("r"), 2.0) == []
    assert conductor.num_open == 0


def test_refusals_are_no_failures_and_are_forgotten_after_one() -> None:
    conductor, order = two_decode_instances(Limits(max_attempts=2, tbt_slo_s=TBT_SLO_S)), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, DecodeRefused(ref(1), "slow", 2, 0.2), 1.0)
    effects = conductor.handle(D1, WorkFailed(ref(2), "first", True), 1.0)
    assert effects[-1] == Effect(D0, Reserve(ref(3), order, TBT_SLO_S, may_refuse=False))


def test_no_instance_refuses_a_request_whose_attempt_has_failed() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    effects = conductor.handle(P0, WorkFailed(ref(), "no", retryable=True), 1.0)
    assert effects[-1] == Effect(D0, Reserve(ref(2), order, TBT_SLO_S, may_refuse=False))


def test_the_check_after_prefill_rejects_no_request_whose_attempt_has_failed() -> None:
    settings = PolicySettings(overload=Overload.BASELINE)
    costs = Costs(0.0, 0.01, 0.0), Costs(0.01, 0.05, 0.0)
    conductor = new_conductor(Limits(tbt_slo_s=TBT_SLO_S), settings, costs)
    for name in ("first", "r"):
        conductor.handle(FRONT, Submit(request(name)), 1.0)
        conductor.handle(D0, Reserved(ref(1, name), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(1, "first"), 42, 0), 1.0)
    conductor.handle(P0, WorkFailed(ref(), "no", retryable=True), 1.0)
    conductor.handle(D0, Reserved(ref(2), GRANT), 1.0)
    [effect] = conductor.handle(P0, Prefilled(ref(2), 42, 0), 1.0)
    assert effect == Effect(D0, Decode(ref(2), 42, 0))
    # Another request, which has not failed, is rejected in the same batch.
    conductor.handle(FRONT, Submit(request("new")), 1.0)
    conductor.handle(D0, Reserved(ref(1, "new"), GRANT), 1.0)
    effects = conductor.handle(P0, Prefilled(ref(1, "new"), 42, 0), 1.0)
    assert isinstance(effects[-1].message, Rejected)


def test_an_accepted_request_that_leaves_a_draining_instance_is_not_refused_by_another() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(D0, Retire(), 1.0)
    assert Effect(D1, Reserve(ref(2), order, TBT_SLO_S, may_refuse=False)) in effects


def test_a_request_that_stays_on_a_draining_instance_is_not_rejected_when_all_refuse_it() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, DecodeRefused(ref(), "slow", 2, 0.2), 1.0)
    effects = conductor.handle(D1, Retire(), 1.0)
    assert all(effect.peer == FRONT for effect in effects), "the other instance has refused the request"
    effects = conductor.handle(D1, DecodeRefused(ref(2), "slow", 2, 0.2), 1.0)
    assert Effect(D0, Reserve(ref(3), order, TBT_SLO_S, may_refuse=False)) in effects


def test_a_repeated_step_is_taken_once() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    assert conductor.handle(D0, Reserved(ref(), GRANT), 1.0) == []
    assert conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 1.0) == []
    assert conductor.num_open == 1


def test_cancel_stops_both_sides_and_only_its_front_may() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert conductor.handle(b"front#2", Cancel("r"), 1.0) == []
    effects = conductor.handle(FRONT, Cancel("r"), 1.0)
    assert effects == [Effect(D0, Abort(ref())), Effect(P0, Abort(ref()))]
    assert conductor.num_open == 0
    assert conductor.handle(FRONT, Cancel("r"), 1.0) == []


def test_work_for_a_request_that_has_ended_is_told_to_stop() -> None:
    conductor = new_conductor()
    assert conductor.handle(D0, Reserved(ref(), GRANT), 1.0) == [Effect(D0, Abort(ref()))]
    assert conductor.handle(D0, Finished(ref(), FinishReason.STOP, 1), 1.0) == []


def test_a_failed_attempt_is_placed_again_and_its_late_messages_are_dropped() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(D0, WorkFailed(ref(), "why", True), 1.0)
    again = Effect(D0, Reserve(ref(2), order, may_refuse=False))
    assert effects == [Effect(D0, Abort(ref())), Effect(P0, Abort(ref())), again]
    assert conductor.handle(P0, Prefilled(ref(1), 1, 0), 1.0) == [Effect(P0, Abort(ref(1)))]


def test_more_tokens_than_the_prompt_has_were_not_cached() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    effects = conductor.handle(P0, Prefilled(ref(), 42, 10), 2.0)
    again = Effect(D0, Reserve(ref(2), order, may_refuse=False))
    assert effects[-1] == again, "it is another attempt, and nothing is learned"
    assert conductor.view.prefill_costs.predict_s(0, 9, 40.5) == pytest.approx(1e-3, rel=0.5)


def test_attempts_are_bounded_and_final_failures_are_told() -> None:
    conductor = new_conductor(Limits(max_attempts=2))
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, WorkFailed(ref(1), "first", True), 1.0)
    effects = conductor.handle(D0, WorkFailed(ref(2), "second", True), 1.0)
    assert effects[-1] == Effect(FRONT, Failed("r", "second"))
    conductor.handle(FRONT, Submit(request("s")), 1.0)
    assert conductor.handle(D0, WorkFailed(ref(1, "s"), "no", False), 1.0)[-1] == Effect(
        FRONT, Failed("s", "no")
    )
    assert conductor.num_open == 0


def test_what_was_never_placed_is_rejected_with_its_reason() -> None:
    conductor = new_conductor(Limits(placement_timeout_s=10.0))
    conductor.peer_gone(D0, 0.5)
    conductor.handle(FRONT, Submit(request("large", 300)), 1.0)
    conductor.handle(FRONT, Submit(request("late", 9)), 1.0)
    small = registration("d0", Role.DECODE, 2, pages=50)
    rejections = [
        effect.message
        for effect in conductor.handle(peer_identity("d0", 2), small, 2.0)
        if isinstance(effect.message, Rejected)
    ]
    assert [(rejected.request_id, rejected.status) for rejected in rejections] == [("large", 400)]
    conductor = new_conductor(Limits(placement_timeout_s=3.0, peer_timeout_s=100.0))
    conductor.peer_gone(D0, 0.5)
    conductor.handle(FRONT, Submit(request()), 1.0)
    [rejected] = [effect.message for effect in conductor.tick(5.0)]
    assert isinstance(rejected, Rejected)
    assert (rejected.status, rejected.retry_after_s) == (503, 1.0)


def test_a_request_does_not_wait_for_ever() -> None:
    conductor = new_conductor(Limits(placement_timeout_s=30.0, return_grace_s=100.0))
    conductor.handle(FRONT, Submit(request()), 0.0)
    conductor.peer_gone(D0, 1.0)
    [(at_s, rejected)] = rejections_when_time_passes(conductor, 4.0, 30.5, 32.0)
    assert at_s == 32.0
    assert rejected.message == "no pair of instances came back in time (d0 is not connected)"
    assert (rejected.status, rejected.retry_after_s) == (503, 1.0)
    assert conductor.num_open == 0


def test_a_request_waits_no_longer_for_a_role_than_an_instance_of_it_is_expected() -> None:
    conductor = new_conductor(Limits(return_grace_s=10.0, placement_timeout_s=60.0))
    conductor.handle(FRONT, Submit(request("lost")), 0.0)
    conductor.peer_gone(D0, 1.0)
    conductor.handle(FRONT, Submit(request("waits")), 8.0)
    rejections = rejections_when_time_passes(conductor, 9.0, 10.9, 11.5)
    assert [(at_s, rejected.request_id, rejected.status) for at_s, rejected in rejections] == [
        (11.5, "lost", 503),
        (11.5, "waits", 503),
    ]
    assert [rejected.message for _, rejected in rejections] == [
        "no decode instance is ready (d0 is not connected)",
        "no decode instance is ready",
    ]
    assert all(rejected.retry_after_s == 1.0 for _, rejected in rejections)
