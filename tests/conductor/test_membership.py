"""Instances that come, go, restart and drain."""

from collections import Counter

import msgspec
import pytest

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    ClusterState,
    Ended,
    Failed,
    FrontHello,
    Rejected,
    Submit,
)
from mooncake.messages.operators import ChangeRole, Drain
from mooncake.messages.pools import PoolShard
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    SPOKEN,
    Abort,
    Finished,
    HeartbeatAck,
    Leave,
    Prefill,
    Prefilled,
    Register,
    Registered,
    RegisterRefused,
    Reserve,
    Reserved,
    Returning,
    ReturnNoted,
    Role,
)
from tests.conductor.small_cluster import (
    D0,
    EPOCH,
    FRONT,
    GRANT,
    HEARTBEAT,
    LAYOUT,
    P0,
    address,
    new_conductor,
    ref,
    registration,
    rejections_when_time_passes,
    request,
    told_to_front,
)


def test_an_instance_on_another_device_than_the_profile_is_refused() -> None:
    costs = Costs(1e-3, 1e-4, 1e-8)
    conductor = Conductor(7, "model", Limits(), PolicySettings(), (costs, costs), "NVIDIA H200")
    fits = msgspec.structs.replace(registration("p0", Role.PREFILL), device="NVIDIA H200")
    (effect,) = conductor.handle(peer_identity("p0", 1), fits, 1.0)
    assert isinstance(effect.message, Registered)
    other = msgspec.structs.replace(registration("p1", Role.PREFILL), device="NVIDIA L4")
    (effect,) = conductor.handle(peer_identity("p1", 1), other, 1.0)
    assert effect.message == RegisterRefused(
        "conductor.profile was measured on NVIDIA H200, p1 computes on NVIDIA L4; measure it anew with"
        " `mooncake-serve profile FILE` on such a device, or leave the profile out"
    )


def test_an_instance_with_the_pool_name_of_another_is_refused() -> None:
    conductor = new_conductor()
    shards = (PoolShard(address("p0"), LAYOUT),)
    register = msgspec.structs.replace(registration("p1", Role.PREFILL), shards=shards)
    (effect,) = conductor.handle(peer_identity("p1", 1), register, 1.0)
    assert isinstance(effect.message, RegisterRefused)
    assert "a name is taken" in effect.message.message
    assert sorted(conductor.prefixes.slots) == ["d0", "p0"]


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
    assert effects[:2] == [
        Effect(d0_again, Registered(EPOCH, PROTOCOL_VERSION)),
        Effect(d0_again, Reserve(ref(2), order, may_refuse=False)),
    ]


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


def test_a_front_and_a_client_are_told_that_all_instances_of_a_role_drain() -> None:
    conductor = new_conductor(Limits(return_grace_s=1.0, placement_timeout_s=60.0))
    conductor.handle(FRONT, Submit(request("waits")), 1.0)
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 1.0)
    effects = conductor.handle(FRONT, Drain(1, "d1"), 2.0)
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


def test_a_life_with_an_unnoticed_end_ends_when_the_next_one_begins() -> None:
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
    assert conductor.handle(D0, HEARTBEAT, 2.0) == [Effect(D0, HeartbeatAck(False, EPOCH))]
    [refused] = conductor.handle(D0, registration("d0", Role.DECODE, 1), 2.0)
    assert isinstance(refused.message, RegisterRefused)
    assert refused.message.retryable


def test_a_repeated_registration_of_the_same_life_costs_nothing() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert conductor.handle(D0, registration("d0", Role.DECODE), 1.5) == [
        Effect(D0, Registered(EPOCH, PROTOCOL_VERSION))
    ]
    assert conductor.handle(D0, Reserved(ref(), GRANT), 2.0) == [Effect(P0, Prefill(ref(), request(), GRANT))]


def test_work_of_an_instance_that_leaves_is_placed_elsewhere_at_once() -> None:
    conductor, order = new_conductor(), request()
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 0.0)
    conductor.handle(FRONT, Submit(order), 1.0)
    effects = conductor.handle(D0, Leave(), 2.0)
    assert Effect(d1, Reserve(ref(2), order, may_refuse=False)) in effects
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
    assert Effect(again, Reserve(ref(2, "large"), order, may_refuse=False)) in effects


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
    assert Effect(live, Reserve(ref(2), order, may_refuse=False)) in conductor.tick(5.5)


def test_prefill_may_die_once_its_part_is_done() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    conductor.peer_gone(P0, 2.0)
    assert conductor.handle(D0, Finished(ref(), FinishReason.LENGTH, 5), 3.0) == [
        Effect(FRONT, Ended("r", 5))
    ]
    assert conductor.num_open == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": "other"}, ["fingerprint", "model", "other", "--dtype"]),
        (
            {"oldest_version": 99},
            ["protocol version", "99", "upgrade the conductor to a release that speaks 99"],
        ),
        ({"oldest_version": 26}, ["protocol version", "26", "upgrade p9 to a release that speaks 27 first"]),
    ],
)
def test_workers_that_do_not_fit_are_refused_by_name(changed: dict[str, object], words: list[str]) -> None:
    fields = {name: getattr(registration("p9", Role.PREFILL), name) for name in Register.__struct_fields__}
    [effect] = new_conductor().handle(peer_identity("p9", 1), Register(**{**fields, **changed}), 1.0)
    assert isinstance(effect.message, RegisterRefused)
    assert all(word in effect.message.message for word in [*words, "p9"])


@pytest.mark.parametrize("newest", [None, SPOKEN.oldest, SPOKEN.newest, SPOKEN.newest + 1])
def test_the_newest_common_version_is_spoken_with_an_instance(newest: int | None) -> None:
    conductor, peer = new_conductor(), peer_identity("p9", 1)
    offer = {"oldest_version": SPOKEN.oldest, "newest_version": newest}
    effects = conductor.handle(peer, msgspec.structs.replace(registration("p9", Role.PREFILL), **offer), 1.0)
    version = min(newest or SPOKEN.oldest, SPOKEN.newest)
    assert effects[0] == Effect(peer, Registered(EPOCH, version))
    assert conductor.versions["instance"] == Counter([SPOKEN.newest, SPOKEN.newest, version])


def test_a_request_of_a_lost_instance_that_yields_to_another_of_it_is_rejected() -> None:
    costs = Costs(0.0, 0.01, 0.0), Costs(0.01, 0.0, 0.0)
    conductor = Conductor(7, "model", Limits(ttft_slo_s=2.5), PolicySettings(), costs)
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    conductor.handle(P0, registration("p0", Role.PREFILL), 0.0)
    conductor.handle(D0, registration("d0", Role.DECODE), 0.0)
    first = msgspec.structs.replace(request("first", 100), block_keys=[])
    conductor.handle(FRONT, Submit(first), 0.0)
    second = msgspec.structs.replace(request("second", 100), block_keys=[], priority=1)
    conductor.handle(FRONT, Submit(second), 0.0)
    conductor.handle(peer_identity("d1", 1), registration("d1", Role.DECODE), 0.5)
    effects = conductor.peer_gone(D0, 1.0)
    assert [effect.message.request_id for effect in effects if isinstance(effect.message, Rejected)] == [
        "second"
    ]
    assert list(conductor.requests) == ["first"]


def test_an_instance_restarts_in_its_first_role_if_nobody_is_left_for_it() -> None:
    conductor = new_conductor(Limits(return_grace_s=1.0))
    p1 = peer_identity("p1", 1)
    conductor.handle(p1, registration("p1", Role.PREFILL), 0.0)
    conductor.handle(FRONT, ChangeRole(1, "p1", Role.DECODE), 0.0)
    again = peer_identity("p1", 2)
    conductor.handle(again, registration("p1", Role.PREFILL, 2), 1.0)
    assert role_of(conductor, "p1") is Role.DECODE
    conductor.peer_gone(P0, 2.0)
    conductor.tick(4.0)
    conductor.handle(peer_identity("p1", 3), registration("p1", Role.PREFILL, 3), 5.0)
    assert role_of(conductor, "p1") is Role.PREFILL


def role_of(conductor: Conductor, name: str) -> Role:
    return next(instance.role for instance in conductor.instances if instance.name == name)


def test_roles_are_given_again_only_to_the_latest_instances_that_are_gone() -> None:
    conductor = new_conductor()
    for number in range(300):  # each start has a name of its own
        peer = peer_identity(f"p-{number}", 1)
        conductor.handle(peer, registration(f"p-{number}", Role.PREFILL), 0.0)
        conductor.handle(FRONT, ChangeRole(number, f"p-{number}", Role.DECODE), 0.0)
        if number:
            conductor.handle(peer, Leave(), 0.0)
    for number, role in ((0, Role.DECODE), (1, Role.PREFILL), (299, Role.DECODE)):
        conductor.handle(peer_identity(f"p-{number}", 2), registration(f"p-{number}", Role.PREFILL, 2), 1.0)
        assert role_of(conductor, f"p-{number}") is role
