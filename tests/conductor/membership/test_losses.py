"""Losses while an instance drains or switches its role: it ends in a declared state, and nothing is left."""

from collections.abc import Callable

import pytest

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.fronts import Cancel, FrontHello, InFlight, Submit
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import HandedOver, HandOver, PreCopied, PreCopy, Prepare, Prepared
from mooncake.messages.operators import ChangeRole, Drain
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Finished,
    InstanceState,
    Leave,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    Retire,
    Retired,
    Returning,
    Role,
    SwitchRole,
)
from tests.conductor.small_cluster import FRONT, GRANT, registration, request

NAMES = ("p0", "p1", "d0", "d1", "d2")
STEPS = 12
"""More messages of workers than the requests below need."""


class Cluster:
    """Two prefill and three decode instances that do what they are told, one message after the other."""

    def __init__(self) -> None:
        self.conductor = Conductor(7, "model", Limits(return_grace_s=1.0, switch_timeout_s=20.0))
        self.now_s, self._life = 1.0, 1
        self._orders: list[Effect] = []
        self.roles: dict[str, Role] = {}
        self.left: set[str] = set()
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), self.now_s)
        for name in NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        self.roles[name] = role
        self.hear(peer_identity(name, self._life), registration(name, role, self._life))

    def hear(self, sender: bytes, message: object) -> None:
        self.take(self.conductor.handle(sender, message, self.now_s))  # type: ignore[arg-type]

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            name = effect.peer.decode().partition("#")[0]
            if isinstance(effect.message, SwitchRole):
                self.roles[name] = effect.message.role
            if isinstance(effect.message, Retired):
                self.left.add(name)
            if isinstance(effect.message, Reserve | Prefill | PreCopy | Prepare | HandOver):
                self._orders.append(effect)

    def step(self) -> bool:
        """Carry out the oldest order, if there is one. Decodes go on until `finish`."""
        if not self._orders:
            return False
        peer, order = self._orders[0].peer, self._orders.pop(0).message
        match order:
            case Reserve(ref=ref):
                self.hear(peer, Reserved(ref, GRANT))
            case Prefill(ref=ref):
                self.hear(peer, Prefilled(ref, 1, 0))
            case PreCopy(ref=ref):
                self.hear(peer, PreCopied(ref, [1, 2, 3]))
            case Prepare(ref=ref):
                self.hear(peer, Prepared(ref, 12))
            case HandOver(ref=ref):
                self.hear(peer, HandedOver(ref, [1, 2, 3, 4]))
        return True

    def finish(self) -> None:
        """Let all be carried out, and all requests end."""
        while self.step():
            pass
        for tracked in list(self.conductor.requests.values()):
            decode = self.conductor.instances.get(tracked.decode)
            if decode is not None:
                self.hear(decode.identity, Finished(tracked.ref, FinishReason.STOP, 4))
            else:
                self.hear(FRONT, Cancel(tracked.request_id))

    def restart(self, name: str) -> None:
        self._life += 1
        self.hear(peer_identity(f"{name}/returning", self._life), Returning(name, self._life, []))
        self.join(name)

    def gone(self, name: str) -> None:
        if (instance := self.conductor.instances.get(name)) is not None:
            self.take(self.conductor.peer_gone(instance.identity, self.now_s))

    def leave(self, name: str) -> None:
        if (instance := self.conductor.instances.get(name)) is not None:
            self.hear(instance.identity, Leave())

    def lose_front(self) -> None:
        self.take(self.conductor.peer_gone(FRONT, self.now_s))
        self.hear(FRONT, FrontHello(PROTOCOL_VERSION, "model"))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.hear(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
        self.hear(FRONT, InFlight(list(self.conductor.requests)))
        for instance in list(self.conductor.instances):
            self.hear(instance.identity, Heartbeat(0, 0, 100, {}))
        self.take(self.conductor.tick(self.now_s))


def switch(cluster: Cluster) -> None:
    cluster.hear(FRONT, ChangeRole(1, "d0", Role.PREFILL))


def drain(cluster: Cluster) -> None:
    cluster.hear(FRONT, Drain(1, "d0"))


def retire(cluster: Cluster) -> None:
    if (instance := cluster.conductor.instances.get("d0")) is not None:
        cluster.hear(instance.identity, Retire())


def lose_all_others(cluster: Cluster) -> None:
    for name in ("d1", "d2", "p1"):
        cluster.gone(name)


def order_again(cluster: Cluster) -> None:
    for order in ORDERS:
        order(cluster)


ORDERS = (switch, drain, retire)
LOSSES: dict[str, Callable[[Cluster], None]] = {
    "nothing": lambda cluster: None,
    "d0": lambda cluster: cluster.gone("d0"),
    "d1, which takes requests over": lambda cluster: cluster.gone("d1"),
    "p0, which prefills": lambda cluster: cluster.gone("p0"),
    "all others": lose_all_others,
    "d0, which restarts": lambda cluster: cluster.restart("d0"),
    "d1, which restarts": lambda cluster: cluster.restart("d1"),
    "d0, which says so": lambda cluster: cluster.leave("d0"),
    "the front": Cluster.lose_front,
    "nothing, and it is ordered again": order_again,
    "nothing, and it is taken back": lambda cluster: cluster.hear(FRONT, Drain(2, "d0", is_wanted=False)),
    "time": lambda cluster: cluster.tick(25.0),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_at_any_step_leaves_nothing(order: Callable[[Cluster], None], loss: str) -> None:
    for num_steps in range(STEPS):
        cluster = Cluster()
        for number in range(6):
            cluster.hear(FRONT, Submit(request(f"r{number}")))
        while cluster.step():
            pass
        for number in range(6, 9):  # not all of them are decoded when the order comes
            cluster.hear(FRONT, Submit(request(f"r{number}")))
        order(cluster)
        d0 = cluster.conductor.instances.get("d0")
        assert d0 is not None
        assert d0.state is not InstanceState.SERVING
        for _ in range(num_steps):
            cluster.step()
        LOSSES[loss](cluster)
        cluster.tick(0.5)
        cluster.finish()
        cluster.tick(0.5)
        assert_nothing_is_left(cluster, f"{loss} after {num_steps} steps")


def assert_nothing_is_left(cluster: Cluster, when: str) -> None:
    conductor = cluster.conductor
    cluster.finish()
    cluster.tick(0.5)
    loads = conductor.view.loads
    assert conductor.num_open == 0, when
    assert not conductor.migrations.in_progress, when
    num_moved = [num for (_, end), num in conductor.stats.migrations.num_ended.items() if end == "moved"]
    if when.startswith("nothing after"):
        assert sum(num_moved) > 1, when
    for array in (loads.num_assigned, loads.batch_size, loads.num_decoding, loads.num_prompts):
        assert not array.any(), when
    for instance in conductor.instances:
        assert not instance.requests, when
        is_settled = instance.state is InstanceState.SERVING or instance.name in cluster.left
        assert is_settled, f"{instance.name} is {instance.state} {when}"
        assert (instance.emptying is None) is (instance.state is InstanceState.SERVING), when
        assert cluster.roles[instance.name] is instance.role, f"{instance.name} {when}"
