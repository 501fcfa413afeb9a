"""Metrics of instances: roles, states, engines, requests, and moves while they drain or switch.

Owns: the names of these metrics. Does not know: how a role changes, the contents of heartbeats.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from conductor.policy import Conductor
from conductor.telemetry.families import counters, gauges
from conductor.view.instances import Emptying
from mooncake.messages.workers import STAGES, InstanceState, Role


def instance_metrics(conductor: Conductor) -> Iterator[Metric]:
    """Yield all metric families of instances, of their switches, and of evacuated blocks."""
    instances = list(conductor.instances)
    by_role = {role.value: sum(instance.role is role for instance in instances) for role in Role}
    yield gauges("mooncake_instances", "registered instances", "role", by_role)
    yield gauges(
        "mooncake_stage_instances",
        "instances that take requests and can do this part of them",
        "stage",
        {stage.value: len(conductor.instances.serving(stage)) for stage in STAGES},
    )
    roles = GaugeMetricFamily(
        "mooncake_instance_role", "1 for the role that an instance has", labels=["instance", "role"]
    )
    states = GaugeMetricFamily(
        "mooncake_instance_state", "1 for the state that an instance is in", labels=["instance", "state"]
    )
    for instance in instances:
        for role in Role:
            roles.add_metric([instance.name, role.value], instance.role is role)
        for state in InstanceState:
            states.add_metric([instance.name, state.value], instance.state is state)
    yield from (roles, states)
    emptying = {one.name: one.emptying or Emptying(0.0) for one in instances}
    yield gauges(
        "mooncake_instance_moved_requests",
        "requests that others have taken over since the instance began to drain or to switch its role",
        "instance",
        {name: of.num_moved for name, of in emptying.items()},
    )
    yield gauges(
        "mooncake_instance_blocks_left",
        "blocks that are yet to be copied to others before the instance leaves",
        "instance",
        {name: of.num_blocks_left for name, of in emptying.items()},
    )
    yield gauges(
        "mooncake_instance_assigned_tokens",
        "prompt tokens assigned to an instance",
        "instance",
        {instance.name: instance.num_assigned_tokens for instance in instances},
    )
    engines = GaugeMetricFamily(
        "mooncake_instance_engine",
        "1 for what computes: on CPUs the kernels' instruction set, or torch at about half their speed",
        labels=["instance", "engine"],
    )
    for instance in instances:
        engines.add_metric([instance.name, instance.registration.engine], 1)
    yield engines
    yield counters(
        "mooncake_role_switches",
        "switches of an instance's role by their end",
        "outcome",
        conductor.roles.num_switches,
    )
    yield CounterMetricFamily(
        "mooncake_evacuated_blocks",
        "blocks of leaving instances that others were told to fetch, as nobody else held them",
        conductor.evacuation.num_ordered_blocks,
    )
