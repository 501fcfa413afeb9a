"""What people are told of instances that come, change and go."""

from prometheus_client import CollectorRegistry

from conductor.policy import Conductor
from conductor.telemetry.changes import InstanceChanges
from conductor.telemetry.metrics import ConductorMetrics
from mooncake.messages.fronts import Submit
from mooncake.messages.operators import ChangeRole, Drain
from mooncake.messages.workers import InstanceState, Prefilled, Reserved, Role
from tests.conductor.small_cluster import D0, D1, FRONT, GRANT, P0, ref, request, two_decode_instances


def seen(conductor: Conductor) -> CollectorRegistry:
    registry = CollectorRegistry()
    ConductorMetrics(conductor, registry, lambda: 1.0, lambda: 0, lambda: 0, dict)
    return registry


def switching() -> Conductor:
    """`d0` decodes a request, and is to prefill."""
    conductor = two_decode_instances()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    conductor.handle(FRONT, ChangeRole(1, "d0", Role.PREFILL), 2.0)
    return conductor


def test_each_change_is_kept_once() -> None:
    conductor, changes = switching(), InstanceChanges()
    for now_s in (2.0, 2.5):
        changes.observe(conductor.instances, now_s)
    conductor.handle(FRONT, Drain(2, "d0", is_wanted=False), 3.0)
    conductor.peer_gone(D1, 3.0)
    changes.observe(conductor.instances, 3.0)
    states = InstanceState
    assert [tuple(change) for change in changes.latest] == [
        (2.0, "p0", Role.PREFILL, states.SERVING, None),
        (2.0, "d0", Role.DECODE, states.SWITCHING, Role.PREFILL),
        (2.0, "d1", Role.DECODE, states.SERVING, None),
        (3.0, "d1", None, None, None),
        (3.0, "d0", Role.DECODE, states.SERVING, None),
    ]


def test_metrics_tell_roles_and_states_and_what_came_of_switches() -> None:
    conductor = switching()
    registry = seen(conductor)
    value = registry.get_sample_value
    assert value("mooncake_instance_state", {"instance": "d0", "state": "switching"}) == 1
    assert value("mooncake_instance_state", {"instance": "d1", "state": "switching"}) == 0
    assert value("mooncake_instance_role", {"instance": "d0", "role": "decode"}) == 1
    assert value("mooncake_stage_instances", {"stage": "decode"}) == 1
    conductor.handle(FRONT, Drain(2, "d0", is_wanted=False), 3.0)
    conductor.handle(FRONT, ChangeRole(3, "d1", Role.PREFILL), 3.0)
    assert value("mooncake_instance_role", {"instance": "d1", "role": "prefill"}) == 1
    assert value("mooncake_role_switches_total", {"outcome": "given_up"}) == 1
    assert value("mooncake_role_switches_total", {"outcome": "done"}) == 1
    assert value("mooncake_instances", {"role": "prefill"}) == 2
