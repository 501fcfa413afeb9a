"""Elasticity in the Conductor: the load changes roles, and requests move."""

import msgspec
import pytest

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import FrontHello, Submit
from mooncake.messages.heartbeats import DecodeLoad, Heartbeat
from mooncake.messages.migration import PreCopy
from mooncake.messages.operators import ChangeRole, Migrate
from mooncake.messages.requests import Request, SamplingParams
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Finished,
    FinishReason,
    InstanceState,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    Role,
    SwitchRole,
)
from tests.conductor.small_cluster import EPOCH, FRONT, GRANT, POOL, registration

PROFILE = Costs(0.01, 1e-4, 0.0), Costs(0.01, 0.0, 1e-6)


class SmallCluster:
    """A Conductor whose instances answer at once."""

    def __init__(
        self, num_prefill: int, num_decode: int, limits: Limits, settings: PolicySettings, **pages: int
    ) -> None:
        """`pages` are those of instances that have fewer or more than others, by name."""
        self.conductor = Conductor(EPOCH, "model", limits, settings, PROFILE)
        self.now_s = 0.0
        self.ordered: list[tuple[str, object]] = []
        """Messages to instances."""
        self.answers_prompts = True
        self.tell(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
        names = [(f"p{n}", Role.PREFILL) for n in range(num_prefill)]
        for name, role in names + [(f"d{n}", Role.DECODE) for n in range(num_decode)]:
            self.tell(f"{name}#1".encode(), registration(name, role, pages=pages.get(name, 100_000)))

    def tell(self, sender: bytes, message: object) -> None:
        self.carry_out(self.conductor.handle(sender, message, self.now_s))  # type: ignore[arg-type]

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            name = effect.peer.decode().partition("#")[0]
            if effect.peer != FRONT:
                self.ordered.append((name, effect.message))
            if isinstance(effect.message, Reserve):
                self.tell(effect.peer, Reserved(effect.message.ref, GRANT))
            elif isinstance(effect.message, Prefill) and self.answers_prompts:
                self.tell(effect.peer, Prefilled(effect.message.ref, 5, 0))

    def submit(self, request_id: str, num_tokens: int, max_tokens: int = 100) -> None:
        sampling = SamplingParams(max_tokens)
        self.tell(FRONT, Submit(Request(request_id, [0] * num_tokens, [], sampling, "ep")))

    def finish(self, request_id: str, num_tokens: int) -> None:
        tracked = self.conductor.requests[request_id]
        assert tracked.decode is not None
        message = Finished(tracked.ref, FinishReason.LENGTH, num_tokens)
        self.tell(f"{tracked.decode}#1".encode(), message)

    def pass_second(self, **loads: DecodeLoad) -> None:
        self.now_s += 1.0
        self.tell(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
        for instance in list(self.conductor.instances):
            load = loads.get(instance.name, DecodeLoad())
            pools = {instance.name: msgspec.structs.replace(POOL, num_pages=100_000, num_free=100_000)}
            self.tell(instance.identity, Heartbeat(load.num_requests, 0, 100_000, pools, decode_load=load))
        self.carry_out(self.conductor.tick(self.now_s))

    def orders(self, kind: type) -> list[tuple[str, object]]:
        return [(name, message) for name, message in self.ordered if isinstance(message, kind)]


def test_an_instance_changes_its_role_and_gets_prompts_in_the_new_one() -> None:
    cluster = SmallCluster(1, 3, Limits(), PolicySettings(has_rebalancing=True))
    switched = flood(cluster)
    assert switched
    cluster.answers_prompts = False
    for number in range(4):
        cluster.submit(f"s{number}", 5000)
    prefilled = {name for name, _ in cluster.orders(Prefill)}
    assert prefilled == switched | {"p0"}
    rebalancer = cluster.conductor.elasticity.rebalancer
    assert rebalancer is not None
    assert {decision.change.instance for decision in rebalancer.decisions} == switched


@pytest.mark.parametrize("phase_s", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_single_burst_moves_no_role(phase_s: float) -> None:
    """What has come is placed by then, and nothing more comes."""
    cluster = SmallCluster(1, 2, Limits(), PolicySettings(has_rebalancing=True))
    cluster.now_s = phase_s
    for number in range(14):
        cluster.submit(f"r{number}", 8000)
        cluster.finish(f"r{number}", 3)
    for _ in range(60):
        cluster.pass_second()
    assert cluster.orders(SwitchRole) == []


def flood(cluster: SmallCluster) -> set[str]:
    """Offer more prompts than one instance computes. Returns the instances that become prefill ones."""
    number = 0
    for _ in range(12):
        cluster.submit("too large", 10, 10**9)
        for _ in range(4):  # prompts of half a second
            number += 1
            cluster.submit(f"r{number}", 5000)
            cluster.finish(f"r{number}", 3)
        cluster.pass_second()
    switches = cluster.orders(SwitchRole)
    assert all(message == SwitchRole(Role.PREFILL) for _, message in switches)
    return {name for name, _ in switches}


@pytest.mark.parametrize("largest", ["d0", "d1", "d2"])
def test_the_only_instance_of_a_role_that_holds_the_longest_sequences_keeps_it(largest: str) -> None:
    smaller = {name: 10_000 for name in ("d0", "d1", "d2") if name != largest}
    switched = flood(SmallCluster(1, 3, Limits(), PolicySettings(has_rebalancing=True), **smaller))
    assert switched
    assert largest not in switched


def test_requests_that_no_cluster_could_serve_count_neither_as_load_nor_as_rejected_for_it() -> None:
    cluster = SmallCluster(1, 3, Limits(), PolicySettings(has_rebalancing=True))
    assert flood(cluster)
    rebalancer = cluster.conductor.elasticity.rebalancer
    assert rebalancer is not None
    assert {decision.accepted_before for decision in rebalancer.decisions} == {1.0}


def test_no_other_change_begins_while_one_is_being_made() -> None:
    """A switch may take as long as `switch_timeout_s` says, here longer than usual."""
    cluster = SmallCluster(2, 4, Limits(switch_timeout_s=300.0), PolicySettings(has_rebalancing=True))
    for name in ("d0", "d1", "d2", "d3"):
        cluster.submit(f"stays on {name}", 10, 3000)
    number = 0
    while cluster.now_s < 80.0:
        for _ in range(8):
            number += 1
            cluster.submit(f"r{number}", 5000)
            cluster.finish(f"r{number}", 3)
        cluster.pass_second()
        switching = [of for of in cluster.conductor.instances if of.state is InstanceState.SWITCHING]
        assert len(switching) <= 1
    assert cluster.conductor.elasticity.rebalancer is not None
    assert len(cluster.conductor.elasticity.rebalancer.decisions) == 1


def test_roles_stay_where_rebalancing_is_off() -> None:
    cluster = SmallCluster(1, 3, Limits(), PolicySettings())
    for number in range(40):
        cluster.submit(f"r{number}", 5000)
        cluster.finish(f"r{number}", 3)
        cluster.pass_second()
    assert cluster.orders(SwitchRole) == []
    assert cluster.conductor.elasticity.rebalancer is None


@pytest.mark.parametrize("moves_requests", [True, False])
def test_a_late_instance_is_relieved(moves_requests: bool) -> None:
    cluster = SmallCluster(1, 2, Limits(tbt_slo_s=0.035), PolicySettings(moves_requests=moves_requests))
    for number in range(4):
        cluster.submit(f"r{number}", 5000)
    cluster.pass_second()
    late = {name: DecodeLoad(2, tbt_s=0.06 if name == "d0" else 0.021) for name in ("d0", "d1")}
    cluster.pass_second(**late)
    assert [name for name, _ in cluster.orders(PreCopy)] == (["d0"] if moves_requests else [])
    cluster.pass_second(**late)
    assert len(cluster.orders(PreCopy)) == moves_requests  # it is being relieved


def test_a_request_is_expected_back_at_the_instance_that_has_computed_its_prompt() -> None:
    cluster = SmallCluster(2, 1, Limits(), PolicySettings())
    cluster.submit("r", 100)
    computed_by = cluster.conductor.requests["r"].prefill
    assert computed_by is not None
    cluster.tell(FRONT, ChangeRole(1, computed_by, Role.DECODE))
    cluster.tell(FRONT, Migrate(2, "r", computed_by))
    batches = {batch.instance: batch for batch in cluster.conductor.elasticity._survey.batches(0.0)}
    assert [of.request_id for of in batches[computed_by].coming] == ["r"]


def test_relief_goes_where_the_whole_answer_fits() -> None:
    """Here d1 is idle, and would hold what the requests are now, but not what they may become."""
    cluster = SmallCluster(1, 3, Limits(tbt_slo_s=0.035), PolicySettings(moves_requests=True), d1=2000)
    for number in range(4):
        cluster.submit(f"r{number}", 5000, 5000)
    cluster.pass_second()
    cluster.pass_second(d0=DecodeLoad(2, tbt_s=0.06), d2=DecodeLoad(2, tbt_s=0.021))
    (moving,) = cluster.conductor.migrations.in_progress.values()
    assert moving.migration is not None
    assert (moving.decode, moving.migration.destination.instance.name) == ("d0", "d2")


def test_requests_that_are_too_many_are_load_too() -> None:
    cluster = SmallCluster(1, 3, Limits(max_running_requests=2), PolicySettings(has_rebalancing=True))
    for number in range(5):
        cluster.submit(f"r{number}", 5000)
    cluster.pass_second()
    load = cluster.conductor.elasticity.demand.load([], cluster.now_s)
    assert load is not None
    assert load.prefill_s == pytest.approx(5 * 0.51)
