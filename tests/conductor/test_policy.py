"""The Conductor as commands in and effects out; `docs/request-path.md` is the order checked here."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.requests.lifecycle import PLACED, RequestState
from conductor.rules import Limits, Rules, SLOs
from mooncake.config.policies import Overload
from mooncake.messages.blocks import KVLayout
from mooncake.messages.bus import peer_identity
from mooncake.messages.fronts import (
    Cancel,
    ClusterState,
    Continue,
    Drain,
    Ended,
    Failed,
    FrontHello,
    InFlight,
    Interrupted,
    KeepContext,
    Rejected,
    Submit,
    Unknown,
)
from mooncake.messages.kv_events import KVStored
from mooncake.messages.pools import Capacity, Grant, GrantedPage, MessengerAddress, PoolShard, PoolStats, Tier
from mooncake.messages.requests import FinishReason, Ref, Request, SamplingParams, TokenLogprobs
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    Finished,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Pin,
    Prefill,
    Prefilled,
    PrefixSource,
    Refused,
    Register,
    Registered,
    RegisterRefused,
    Reserve,
    Reserved,
    Returning,
    ReturnNoted,
    Role,
    Unpin,
    WorkFailed,
)

EPOCH = 7
FRONT = b"front#1"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
P0, D0 = peer_identity("p0", 1), peer_identity("d0", 1)


def address(name: str) -> MessengerAddress:
    return MessengerAddress(name, 1, "host", "/path", (("127.0.0.1", 1),))


def registration(name: str, role: Role, incarnation: int = 1, pages: int = 100) -> Register:
    return Register(
        PROTOCOL_VERSION,
        name,
        incarnation,
        role,
        "model",
        LAYOUT,
        (PoolShard(address(name), LAYOUT),),
        Capacity(pages, pages),
        "cpu",
    )


def request(request_id: str = "r", num_tokens: int = 9) -> Request:
    return Request(
        request_id, list(range(num_tokens)), [b"k" * 16] * (num_tokens // 4), SamplingParams(5), "ep"
    )


def told_to_front(effects: list[Effect]) -> list[tuple[int, int, int]]:
    """Of each state of the cluster: instances that prefill and that decode, and blocks of a sequence."""
    states = [effect.message for effect in effects if isinstance(effect.message, ClusterState)]
    return [(state.num_prefill, state.num_decode, state.max_sequence_blocks) for state in states]


def ref(attempt: int = 1, request_id: str = "r") -> Ref:
    return Ref(EPOCH, request_id, attempt)


POOL = PoolStats(
    num_pages=9,
    num_free=9,
    num_reserved=0,
    num_sealed=0,
    num_quarantined=0,
    num_used=0,
    num_reservations=0,
    num_leases=0,
    num_pins=0,
    block_bytes=4096,
    eviction_policy="lru",
    tiers={},
    num_misses={},
    num_dropped=0,
    num_removed=0,
    num_demotions=0,
    num_promotions=0,
    num_expired_leases=0,
    num_checksum_failures=0,
    num_orphaned=0,
    sent_bytes={},
    received_bytes={},
)
HEARTBEAT = Heartbeat(0, 0, 0, {"p0": POOL})
GRANT = Grant(1, address("d0"), [GrantedPage(0, 5, 1), GrantedPage(1, 6, 1)])


def new_conductor(limits: Limits | None = None) -> Conductor:
    conductor = Conductor(EPOCH, "model", limits or Limits())
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    conductor.handle(P0, registration("p0", Role.PREFILL), 0.0)
    conductor.handle(D0, registration("d0", Role.DECODE), 0.0)
    return conductor


def test_an_instance_whose_pool_has_the_name_of_another_is_refused() -> None:
    conductor = new_conductor()
    shards = (PoolShard(address("p0"), LAYOUT),)
    register = msgspec.structs.replace(registration("p1", Role.PREFILL), shards=shards)
    (effect,) = conductor.handle(peer_identity("p1", 1), register, 1.0)
    assert isinstance(effect.message, RegisterRefused)
    assert "a name is taken" in effect.message.message
    assert sorted(conductor.prefixes.slots) == ["d0", "p0"]


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
    assert conductor.num_running == 0
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


def test_prefill_is_ordered_nothing_that_decode_computes_itself() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert conductor.handle(D0, Reserved(ref(), GRANT, inlined=True), 1.0) == []
    prefill = conductor.instances.get("p0")
    assert prefill is not None
    assert prefill.num_assigned_tokens == 0
    conductor.peer_gone(P0, 2.0)
    finished = conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 3.0)
    assert finished == [Effect(FRONT, Ended("r", 3))]


def test_a_request_that_decode_computed_itself_is_refused_by_nobody_later() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT, inlined=True), 1.0)
    effects = conductor.handle(D0, WorkFailed(ref(), "damaged", True), 2.0)
    assert effects[-1] == Effect(FRONT, Interrupted("r"))
    assert conductor.handle(FRONT, Continue(order), 2.0) == [
        Effect(D0, Reserve(ref(2), order, TBT_SLO_S, may_refuse=False))
    ]


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


D1 = peer_identity("d1", 1)
TBT_SLO_S = 0.1


def two_decode_instances(limits: Limits | None = None) -> Conductor:
    conductor = new_conductor(limits or Limits(tbt_slo_s=TBT_SLO_S))
    conductor.handle(D1, registration("d1", Role.DECODE), 0.0)
    return conductor


def test_whom_one_decode_instance_refuses_is_placed_on_another() -> None:
    """Mooncake, section 3: the local scheduler double-checks."""
    conductor, order = two_decode_instances(), request()
    assert conductor.handle(FRONT, Submit(order), 1.0) == [Effect(D0, Reserve(ref(), order, TBT_SLO_S))]
    effects = conductor.handle(D0, Refused(ref(), "slow", 2, 0.2), 1.0)
    assert effects == [
        Effect(D0, Abort(ref())),
        Effect(P0, Abort(ref())),
        Effect(D1, Reserve(ref(2), order, TBT_SLO_S)),
    ]


def test_whom_all_decode_instances_refuse_is_told_when_to_come_back() -> None:
    conductor = two_decode_instances()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Refused(ref(), "slow", 2, 0.2), 1.0)
    *aborts, rejected = conductor.handle(D1, Refused(ref(2), "slower", 2, 0.3), 1.0)
    assert aborts == [Effect(D1, Abort(ref(2))), Effect(P0, Abort(ref(2)))]
    assert rejected == Effect(FRONT, Rejected("r", 429, "slower", 1.0))
    assert conductor.num_running == 0
    assert all(not instance.requests for instance in conductor.instances)


def test_a_request_may_be_refused_when_its_prefill_has_ended() -> None:
    conductor, order = two_decode_instances(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    effects = conductor.handle(D0, Refused(ref(), "slow", 2, 0.2), 1.0)
    assert effects[-1] == Effect(D1, Reserve(ref(2), order, TBT_SLO_S))


def test_a_refusal_teaches_what_a_batch_takes_without_those_that_wait_for_their_turn() -> None:
    conductor = new_conductor(Limits(tbt_slo_s=TBT_SLO_S, ttft_slo_s=100.0))
    for name in ("r", "s", "t"):
        conductor.handle(FRONT, Submit(request(name)), 1.0)
        conductor.handle(D0, Reserved(ref(1, name), GRANT), 1.0)
        conductor.handle(P0, Prefilled(ref(1, name), 42, 0), 1.0)
    conductor.handle(D0, Refused(ref(), "slow", 2, 0.2), 1.0)
    slot = conductor.view.slot_of("d0")
    assert slot is not None
    num_tokens = 2 * len(request().token_ids)
    assert conductor.view.decode_costs.predict_s(slot, 2, num_tokens) == pytest.approx(0.2)


def test_who_has_waited_for_its_turn_until_its_first_token_is_due_is_not_placed_elsewhere() -> None:
    limits = Limits(tbt_slo_s=TBT_SLO_S, ttft_slo_s=4.0)
    conductor, order = two_decode_instances(limits), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    [effect] = conductor.handle(P0, Prefilled(ref(), 42, 0), 1.5)
    assert effect == Effect(D0, Decode(ref(), 42, 0, time_left_s=3.5))
    effects = conductor.handle(D0, Refused(ref(), "slow", 2, 0.2), 5.0)
    assert effects[-1] == Effect(FRONT, Rejected("r", 429, "slow", 1.0))


def test_nobody_refuses_a_request_whose_tokens_may_have_left() -> None:
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


def test_an_interrupted_request_that_nobody_wants_ends() -> None:
    conductor = two_decode_instances()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT, inlined=True), 1.0)
    conductor.peer_gone(D0, 2.0)
    assert conductor.handle(FRONT, Cancel("r"), 2.0) == []
    assert conductor.num_running == 0


def test_refusals_are_no_failures_and_are_forgotten_after_one() -> None:
    conductor, order = two_decode_instances(Limits(max_attempts=2, tbt_slo_s=TBT_SLO_S)), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Refused(ref(1), "slow", 2, 0.2), 1.0)
    effects = conductor.handle(D1, WorkFailed(ref(2), "first", True), 1.0)
    assert effects[-1] == Effect(D0, Reserve(ref(3), order, TBT_SLO_S))


def test_a_repeated_step_is_taken_once() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    assert conductor.handle(D0, Reserved(ref(), GRANT), 1.0) == []
    assert conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 1.0) == []
    assert conductor.num_running == 1


def test_cancel_stops_both_sides_and_only_its_front_may() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert conductor.handle(b"front#2", Cancel("r"), 1.0) == []
    effects = conductor.handle(FRONT, Cancel("r"), 1.0)
    assert effects == [Effect(D0, Abort(ref())), Effect(P0, Abort(ref()))]
    assert conductor.num_running == 0
    assert conductor.handle(FRONT, Cancel("r"), 1.0) == []


def test_work_for_a_request_that_has_ended_is_told_to_stop() -> None:
    conductor = new_conductor()
    assert conductor.handle(D0, Reserved(ref(), GRANT), 1.0) == [Effect(D0, Abort(ref()))]
    assert conductor.handle(D0, Finished(ref(), FinishReason.STOP, 1), 1.0) == []


def test_least_loaded_pair_is_chosen() -> None:
    conductor = new_conductor()
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 0.0)
    conductor.handle(FRONT, Submit(request("a", 20)), 1.0)
    assert conductor.handle(FRONT, Submit(request("b", 4)), 1.0)[0].peer == d1
    assert conductor.handle(FRONT, Submit(request("c", 4)), 1.0)[0].peer == d1


@pytest.mark.parametrize(
    ("order", "status", "word"),
    [
        (request(num_tokens=396), 400, "KVCache of a decode instance holds at most 100 blocks of 4 tokens"),
        (request("taken"), 409, "already running"),
    ],
)
def test_impossible_requests_are_rejected(order: Request, status: int, word: str) -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request("taken")), 1.0)
    [effect] = conductor.handle(FRONT, Submit(order), 1.0)
    assert isinstance(effect.message, Rejected)
    assert effect.message.status == status
    assert word in effect.message.message
    assert conductor.num_running == 1


def test_fronts_that_were_not_accepted_submit_nothing() -> None:
    [effect] = new_conductor().handle(b"front#2", Submit(request()), 1.0)
    assert isinstance(effect.message, Rejected)
    assert effect.message.status == 503


def test_full_and_empty_clusters_say_when_to_come_back() -> None:
    conductor = new_conductor(Limits(max_running_requests=1))
    conductor.handle(FRONT, Submit(request("a")), 1.0)
    [full] = conductor.handle(FRONT, Submit(request("b")), 1.0)
    [empty] = Conductor(EPOCH, "model", Limits()).handle(FRONT, Submit(request()), 1.0)
    for effect, status in ((full, 429), (empty, 503)):
        assert isinstance(effect.message, Rejected)
        assert (effect.message.status, effect.message.retry_after_s) == (status, 1.0)


def test_a_failed_attempt_is_placed_again_and_its_late_messages_are_dropped() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(D0, WorkFailed(ref(), "why", True), 1.0)
    assert effects == [Effect(D0, Abort(ref())), Effect(P0, Abort(ref())), Effect(D0, Reserve(ref(2), order))]
    assert conductor.handle(P0, Prefilled(ref(1), 1, 0), 1.0) == [Effect(P0, Abort(ref(1)))]


def test_more_tokens_than_the_prompt_has_were_not_cached() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    effects = conductor.handle(P0, Prefilled(ref(), 42, 10), 2.0)
    assert effects[-1] == Effect(D0, Reserve(ref(2), order)), "it is another attempt, and nothing is learned"
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
    assert conductor.num_running == 0


def test_requests_of_a_silent_instance_wait_for_its_return() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 5.0)
    conductor.handle(P0, HEARTBEAT, 5.0)
    effects = conductor.tick(5.5)
    assert (1, 0, 100) in told_to_front(effects)
    assert Effect(P0, Abort(ref())) in effects
    d0_again = peer_identity("d0", 2)
    effects = conductor.handle(d0_again, registration("d0", Role.DECODE, 2), 6.0)
    assert effects[:2] == [Effect(d0_again, Registered()), Effect(d0_again, Reserve(ref(2), order))]


def test_a_request_that_comes_while_an_instance_restarts_waits_for_it() -> None:
    conductor, order = new_conductor(Limits(return_grace_s=10.0)), request()
    conductor.peer_gone(D0, 1.0)
    assert conductor.handle(FRONT, Submit(order), 2.0) == []
    d0_again = peer_identity("d0", 2)
    effects = conductor.handle(d0_again, registration("d0", Role.DECODE, 2), 3.0)
    assert Effect(d0_again, Reserve(ref(1), order)) in effects
    conductor.peer_gone(d0_again, 4.0)
    conductor.handle(P0, HEARTBEAT, 14.0)
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 14.0)
    conductor.tick(14.5)
    [rejected] = conductor.handle(FRONT, Submit(request("late")), 15.0)
    assert isinstance(rejected.message, Rejected)
    assert (rejected.message.status, rejected.message.message) == (503, "no decode instance is ready")


def test_a_front_is_told_which_of_its_requests_the_conductor_does_not_have() -> None:
    """It never heard of them, or said how they ended to nobody."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request("here")), 1.0)
    [answer] = conductor.handle(FRONT, InFlight(["swallowed", "here"]), 1.5)
    assert answer == Effect(FRONT, Unknown(["swallowed"]))
    assert conductor.num_running == 1
    other_front = peer_identity("front1", 1)
    assert conductor.handle(other_front, InFlight(["here"]), 1.5) == [Effect(other_front, Unknown(["here"]))]


def test_a_request_that_its_front_does_not_have_ends_at_the_second_heartbeat() -> None:
    """Its last tokens have reached the front a moment before the Conductor hears of them, or its cancellation
    was swallowed."""
    conductor = new_conductor()
    for request_id in ("cancelled", "other"):
        conductor.handle(FRONT, Submit(request(request_id)), 1.0)
    assert conductor.handle(FRONT, InFlight(["other"]), 1.5) == []
    assert conductor.handle(FRONT, InFlight(["cancelled", "other"]), 2.5) == []
    assert conductor.handle(FRONT, InFlight(["other"]), 3.5) == []
    other_front = peer_identity("front1", 1)
    for _ in range(3):
        assert conductor.handle(other_front, InFlight([]), 4.0) == []
    effects = conductor.handle(FRONT, InFlight(["other"]), 4.5)
    assert {effect.message for effect in effects if isinstance(effect.message, Abort)} == {
        Abort(ref(request_id="cancelled"))
    }
    assert set(conductor.requests) == {"other"}


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


def rejections_when_time_passes(conductor: Conductor, *moments_s: float) -> list[tuple[float, Rejected]]:
    """Each with the moment at which it comes. The front and the instances are alive all the time."""
    rejections = []
    for now_s in moments_s:
        conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), now_s)
        for instance in conductor.instances:
            conductor.handle(instance.identity, HEARTBEAT, now_s)
        effects = conductor.tick(now_s)
        rejections += [(now_s, e.message) for e in effects if isinstance(e.message, Rejected)]
    return rejections


def test_a_request_does_not_wait_for_ever() -> None:
    conductor = new_conductor(Limits(placement_timeout_s=30.0, return_grace_s=100.0))
    conductor.handle(FRONT, Submit(request()), 0.0)
    conductor.peer_gone(D0, 1.0)
    [(at_s, rejected)] = rejections_when_time_passes(conductor, 4.0, 30.5, 32.0)
    assert at_s == 32.0
    assert rejected.message == "no pair of instances came back in time (d0 is not connected)"
    assert (rejected.status, rejected.retry_after_s) == (503, 1.0)
    assert conductor.num_running == 0


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


def test_a_front_and_a_client_are_told_that_all_instances_of_a_role_drain() -> None:
    conductor = new_conductor(Limits(return_grace_s=1.0, placement_timeout_s=60.0))
    conductor.handle(FRONT, Submit(request("waits")), 1.0)
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 1.0)
    effects = conductor.handle(FRONT, Drain("d1"), 2.0)
    states = [effect.message for effect in effects if isinstance(effect.message, ClusterState)]
    assert [(state.num_decode, state.num_draining) for state in states] == [
        (1, {Role.PREFILL: 0, Role.DECODE: 1})
    ]
    conductor.peer_gone(D0, 3.0)
    [(at_s, rejected)] = rejections_when_time_passes(conductor, 3.5, 4.5)
    assert (at_s, rejected.status) == (4.5, 503)
    assert rejected.message == "all decode instances are draining (d0 is not connected)"
    [effect] = conductor.handle(FRONT, Submit(request("late")), 5.0)
    assert isinstance(effect.message, Rejected)
    assert effect.message.message == "all decode instances are draining"


def test_an_instance_that_loads_its_model_again_is_waited_for() -> None:
    conductor, order = new_conductor(Limits(return_grace_s=10.0, placement_timeout_s=60.0)), request()
    conductor.peer_gone(D0, 1.0)
    conductor.handle(FRONT, Submit(order), 2.0)
    again = peer_identity("d0", 2)
    returning = peer_identity("d0/returning", 2)
    assert conductor.handle(returning, Returning("d0", 2, []), 5.0) == [Effect(returning, ReturnNoted())]
    assert rejections_when_time_passes(conductor, 20.0, 40.0) == []
    effects = conductor.handle(again, registration("d0", Role.DECODE, 2), 45.0)
    assert Effect(again, Reserve(ref(1), order)) in effects


def test_a_life_whose_end_nobody_had_noticed_ends_when_the_next_one_begins() -> None:
    conductor, order = new_conductor(), request()
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(peer_identity("d0/returning", 2), Returning("d0", 2, []), 2.0)
    assert Effect(P0, Abort(ref())) in effects
    assert (1, 0, 100) in told_to_front(effects)
    late = Returning("d0", 2, [])
    again = peer_identity("d0", 3)
    conductor.handle(again, registration("d0", Role.DECODE, 3), 3.0)
    assert conductor.handle(peer_identity("d0/returning", 2), late, 4.0)[1:] == [], "it is an earlier one"


def test_an_earlier_life_is_fenced_off() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(peer_identity("d0", 2), registration("d0", Role.DECODE, 2), 2.0)
    assert conductor.handle(D0, Reserved(ref(), GRANT), 2.0) == []
    assert conductor.handle(D0, HEARTBEAT, 2.0) == [Effect(D0, HeartbeatAck(known=False))]
    [refused] = conductor.handle(D0, registration("d0", Role.DECODE, 1), 2.0)
    assert isinstance(refused.message, RegisterRefused)
    assert refused.message.retryable


def test_a_repeated_registration_of_the_same_life_costs_nothing() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert conductor.handle(D0, registration("d0", Role.DECODE), 1.5) == [Effect(D0, Registered())]
    assert conductor.handle(D0, Reserved(ref(), GRANT), 2.0) == [Effect(P0, Prefill(ref(), request(), GRANT))]


def test_the_conductors_own_silence_is_not_held_against_others() -> None:
    conductor = new_conductor(Limits(peer_timeout_s=5.0))
    conductor.tick(1.0)
    assert conductor.tick(60.0) == []  # it was stopped for a minute
    assert len(list(conductor.instances)) == 2
    for now_s in (61.0, 62.0, 63.0, 64.0, 65.5):
        conductor.tick(now_s)
    assert list(conductor.instances) == []


def test_the_conductors_own_silence_does_not_hide_a_death() -> None:
    conductor = new_conductor(Limits(peer_timeout_s=5.0))
    conductor.tick(1.0)
    conductor.handle(D0, HEARTBEAT, 600.0)
    conductor.tick(600.1)
    for now_s in (602.0, 604.0, 605.5):
        conductor.tick(now_s)
    assert list(conductor.instances) == []


def test_work_of_an_instance_that_leaves_is_placed_elsewhere_at_once() -> None:
    conductor, order = new_conductor(), request()
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 0.0)
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(D0, Leave(), 2.0)
    assert Effect(d1, Reserve(ref(2), order)) in effects
    assert (1, 1, 100) in told_to_front(effects)
    assert conductor.handle(D0, Leave(), 2.0) == []


def test_a_large_request_waits_for_the_large_instance_that_restarts() -> None:
    conductor, order = new_conductor(), request("large", 300)
    small = peer_identity("small", 1)
    conductor.handle(small, registration("small", Role.DECODE, pages=4), 0.0)
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.peer_gone(D0, 2.0)
    assert not [effect for effect in effects if isinstance(effect.message, Failed | Reserve)]
    assert conductor.handle(FRONT, Submit(request("another", 300)), 2.5) == []
    again = peer_identity("d0", 2)
    effects = conductor.handle(again, registration("d0", Role.DECODE, 2), 3.0)
    assert Effect(again, Reserve(ref(2, "large"), order)) in effects


def test_what_a_smaller_prefill_cannot_hold_is_rejected_even_without_any_decode() -> None:
    conductor = new_conductor(Limits(return_grace_s=10.0, peer_timeout_s=100.0))
    conductor.peer_gone(D0, 1.0)
    conductor.handle(FRONT, Submit(request("large", 300)), 2.0)
    conductor.peer_gone(P0, 3.0)
    effects = conductor.handle(peer_identity("p0", 2), registration("p0", Role.PREFILL, 2, pages=4), 9.0)
    [rejected] = [effect.message for effect in effects if isinstance(effect.message, Rejected)]
    assert (rejected.request_id, rejected.status) == ("large", 400)
    assert "at most 4 blocks of 4 tokens" in rejected.message


def test_instances_that_fall_silent_together_cost_one_attempt() -> None:
    conductor, order = new_conductor(Limits(max_attempts=2)), request()
    for name in ("d1", "d2"):
        conductor.handle(peer_identity(name, 1), registration(name, Role.DECODE), 0.0)
    conductor.handle(FRONT, Submit(order), 1.0)
    live = peer_identity("d9", 1)
    conductor.handle(live, registration("d9", Role.DECODE), 5.0)
    conductor.handle(P0, HEARTBEAT, 5.0)
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 5.0)
    assert Effect(live, Reserve(ref(2), order)) in conductor.tick(5.5)


def test_prefill_may_die_once_its_part_is_done() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    conductor.peer_gone(P0, 2.0)
    assert conductor.handle(D0, Finished(ref(), FinishReason.LENGTH, 5), 3.0) == [
        Effect(FRONT, Ended("r", 5))
    ]
    assert conductor.num_running == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": "other"}, ["fingerprint", "model", "other", "--dtype"]),
        ({"protocol_version": 99}, ["protocol version", "99", "same release"]),
    ],
)
def test_workers_that_do_not_fit_are_refused_by_name(changed: dict[str, object], words: list[str]) -> None:
    fields = {name: getattr(registration("p9", Role.PREFILL), name) for name in Register.__struct_fields__}
    [effect] = new_conductor().handle(peer_identity("p9", 1), Register(**{**fields, **changed}), 1.0)
    assert isinstance(effect.message, RegisterRefused)
    assert all(word in effect.message.message for word in [*words, "p9"])


def test_fronts_that_do_not_fit_are_refused() -> None:
    for hello in (FrontHello(99, "model"), FrontHello(PROTOCOL_VERSION, "other")):
        [effect] = new_conductor().handle(b"front#2", hello, 1.0)
        assert isinstance(effect.message, RegisterRefused)


def test_requests_of_a_vanished_front_end_and_it_is_told_should_it_return() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert known(conductor, 1.5)
    for identity in (P0, D0):
        conductor.handle(identity, HEARTBEAT, 7.0)
    [*aborts, failed] = conductor.tick(7.0)
    assert [effect.message for effect in aborts] == [Abort(ref()), Abort(ref())]
    assert failed.peer == FRONT
    assert isinstance(failed.message, Failed)
    assert conductor.num_running == 0
    # It may not have heard that.
    assert not known(conductor, 8.0)
    assert known(conductor, 9.0)


def known(conductor: Conductor, now_s: float) -> bool:
    """Whether the front is told that its requests are known."""
    [effect] = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), now_s)
    assert isinstance(effect.message, ClusterState)
    return effect.message.known


class RequestsEndOnce(RuleBasedStateMachine):
    """Whatever order messages, deaths and returns come in, no request is lost, ends twice, or is a load when
    it has ended."""

    overload = Overload.PREDICTION

    def __init__(self) -> None:
        super().__init__()
        # SLOs that some requests would miss: whom the generic costs reject is told so.
        limits = Limits(
            max_running_requests=12,
            ttft_slo_s=0.004,
            tbt_slo_s=0.0053,
            slo_classes={"patient": SLOs(5.0, 0.0052)},
            max_waiting=3,
        )
        self.conductor = Conductor(EPOCH, "model", limits, Rules(overload=self.overload))
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
            self.conductor.handle(peer_identity(name, 1), registration(name, role), 0.0)
        self.now_s = 0.0
        self.incarnation = 1
        self.open: set[str] = set()
        self.orders: list[Effect] = []
        self.count = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.peer == FRONT and isinstance(effect.message, Failed | Rejected):
                assert effect.message.request_id in self.open
                self.open.remove(effect.message.request_id)
            if isinstance(effect.message, Reserve | Prefill | Decode):
                self.orders.append(effect)

    @rule(priority=st.integers(-1, 1), tenant=st.sampled_from("ab"), slo=st.sampled_from(["", "patient"]))
    def submit(self, priority: int, tenant: str, slo: str) -> None:
        self.count += 1
        self.open.add(f"r{self.count}")
        order = msgspec.structs.replace(
            request(f"r{self.count}", 9 + 40 * (self.count % 3)),
            priority=priority,
            tenant=tenant,
            slo_class=slo,
        )
        self.take(self.conductor.handle(FRONT, Submit(order), self.now_s))

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), num_blocks=st.integers(1, 4))
    def store(self, name: str, num_blocks: int) -> None:
        self.conductor.prefixes.apply(name, [KVStored(Tier.DRAM, [b"k" * 16] * num_blocks)])

    @rule(data=st.data(), outcome=st.sampled_from(["well", "retry", "fail", "refuse", "lost"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        if not self.orders:
            return
        effect = data.draw(st.sampled_from(self.orders))
        if outcome != "well" or not isinstance(effect.message, Reserve):
            self.orders.remove(effect)
        order = effect.message
        assert isinstance(order, Reserve | Prefill | Decode)
        before = self.conductor.num_running
        if outcome in ("retry", "fail"):
            self.take(
                self.conductor.handle(effect.peer, WorkFailed(order.ref, "x", outcome == "retry"), self.now_s)
            )
        elif outcome == "refuse":
            self.take(self.conductor.handle(effect.peer, Refused(order.ref, "slow", 2, 0.2), self.now_s))
        elif outcome == "well":
            match order:
                case Reserve(ref=ref):
                    self.take(self.conductor.handle(effect.peer, Reserved(ref, GRANT), self.now_s))
                case Prefill(ref=ref):
                    self.take(self.conductor.handle(effect.peer, Prefilled(ref, 1, 0), self.now_s))
                case Decode(ref=ref):
                    done = Finished(ref, FinishReason.STOP, 1)
                    self.take(self.conductor.handle(effect.peer, done, self.now_s))
                    if self.conductor.num_running < before:
                        self.open.remove(ref.request_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            request_id = data.draw(st.sampled_from(sorted(self.open)))
            self.take(self.conductor.handle(FRONT, Cancel(request_id), self.now_s))
            self.open.remove(request_id)

    @rule(data=st.data())
    def lose_the_connection(self, data: st.DataObject) -> None:
        """A cancellation and a request are swallowed; two heartbeats come."""
        gone = data.draw(st.sampled_from(sorted(self.open))) if self.open else None
        self.open.discard(gone or "")
        for _ in range(2):
            effects = self.conductor.handle(FRONT, InFlight([*self.open, "swallowed"]), self.now_s)
            self.take(effects)
            assert Effect(FRONT, Unknown(["swallowed"])) in effects

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), registers=st.booleans())
    def restart(self, name: str, registers: bool) -> None:
        if registers:
            self.incarnation += 1
            identity = peer_identity(name, self.incarnation)
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            message = registration(name, role, self.incarnation)
            self.take(self.conductor.handle(identity, message, self.now_s))
        elif (instance := self.conductor.instances.get(name)) is not None:
            self.take(self.conductor.peer_gone(instance.identity, self.now_s))

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), is_wanted=st.booleans())
    def drain(self, name: str, is_wanted: bool) -> None:
        self.take(self.conductor.handle(FRONT, Drain(name, is_wanted), self.now_s))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), self.now_s)
        self.take(self.conductor.tick(self.now_s))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.conductor.requests) == self.open
        for instance in self.conductor.instances:
            assert set(instance.requests) <= self.open
        for tracked in self.conductor.requests.values():
            assert (tracked.assignment is not None) is (tracked.state in PLACED)

    @invariant()
    def loads_are_those_of_open_requests(self) -> None:
        loads, transfers = self.conductor.view.loads, self.conductor.view.transfers
        assert loads.num_slots <= 3
        for instance in self.conductor.instances:
            slot = self.conductor.prefixes.slots[instance.name]
            assert loads.num_assigned[slot] == len(instance.requests)
        states = [tracked.state for tracked in self.conductor.requests.values()]
        assert self.conductor.num_queued == states.count(RequestState.QUEUED)
        num_placed = sum(state in PLACED for state in states)
        assert loads.batch_size.sum() == num_placed
        assert loads.num_decoding.sum() == states.count(RequestState.DECODING)
        if not num_placed:
            for array in (loads.queued_s, loads.num_kv_tokens, loads.num_decoding_tokens):
                assert not array.any()
            assert not transfers.ordered_bytes.any()


class RequestsEndOnceWithTheBaseline(RequestsEndOnce):
    """Section 7.1: decode's load is checked when prefill has ended."""

    overload = Overload.BASELINE


TestRequestsEndOnce = RequestsEndOnce.TestCase
TestRequestsEndOnce.settings = settings(max_examples=60, stateful_step_count=40)
TestRequestsEndOnceWithTheBaseline = RequestsEndOnceWithTheBaseline.TestCase
TestRequestsEndOnceWithTheBaseline.settings = settings(max_examples=20, stateful_step_count=40)


def test_same_input_same_output() -> None:
    transcripts = []
    for _ in range(2):
        conductor = new_conductor(replace(Limits(), max_running_requests=2))
        effects = [conductor.handle(FRONT, Submit(request(name)), 1.0) for name in "abc"]
        transcripts.append([*effects, conductor.tick(30.0)])
    assert transcripts[0] == transcripts[1]


def test_a_context_cache_is_pinned_and_the_front_learns_what_prefill_costs() -> None:
    conductor = new_conductor()
    keys = [b"k" * 16]
    conductor.prefixes.apply("p0", [KVStored(Tier.DRAM, keys)])
    effects = conductor.handle(FRONT, KeepContext("c", keys, 30.0), 1.0)
    assert effects == [Effect(P0, Pin(keys, 30.0))]
    (answer,) = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 1.0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(answer.message), type=ClusterState)
    assert decoded.prefill_costs is not None
    assert decoded.prefill_costs.seconds(100, 0) > 0
    assert conductor.tick(2.0) == []
    (dropped,) = conductor.tick(31.0)[-1:]
    assert dropped == Effect(P0, Unpin(keys))
