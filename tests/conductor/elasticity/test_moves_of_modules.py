"""Layers and KV heads that the Conductor moves by itself: when it does, and when it leaves them alone."""

import random

import msgspec
import pytest

from conductor.effects import Effect
from conductor.elasticity.control import MODULES_AGAIN_S, MODULES_PERIOD_S
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import Cancel, FrontHello, Submit
from mooncake.messages.heartbeats import DecodeStats, Heartbeat
from mooncake.messages.migration import ModulesPart, ModulesPlace, ModulesSupport, PlaceModules
from mooncake.messages.operators import ChangeRole, MoveModules
from mooncake.messages.pools import PoolShard
from mooncake.messages.requests import Request, SamplingParams
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    InstanceState,
    Prefill,
    Prefilled,
    Register,
    Reserve,
    Reserved,
    Role,
)
from tests.conductor.small_cluster import EPOCH, FRONT, GRANT, POOL, address, registration

PROFILE = Costs(0.01, 1e-4, 0.0), Costs(0.01, 0.0, 1e-6)
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=8, block_size=4, dtype="float32")
NUM_PAGES, NUM_REQUESTS = 10_000, 30
BUSY, IDLE = (2000, 0.9), (100, 0.05)
"""Tokens that are drawn in a second, and the share of device pages in use."""


def member(name: str, role: Role, host: str, why_not: str) -> Register:
    shard = PoolShard(msgspec.structs.replace(address(name), host_id=host), LAYOUT)
    return msgspec.structs.replace(
        registration(name, role, pages=NUM_PAGES),
        layout=LAYOUT,
        shards=(shard,),
        modules=ModulesSupport(f"/run/{name}", why_not),
    )


class Cluster:
    """A prefill instance and three that decode, whose orders about modules are carried out at once.

    The prefill instance is idle, on a host of its own by default.
    """

    def __init__(
        self,
        *,
        moves_modules: bool = True,
        hosts: tuple[str, ...] = ("host", "host", "host"),
        prefill_host: str = "host of prompts",
        why_not: str = "",
        limits: Limits | None = None,
    ) -> None:
        settings = PolicySettings(moves_modules=moves_modules, has_rebalancing=True)
        self.conductor = Conductor(EPOCH, "model", limits or Limits(), settings, PROFILE)
        self.now_s, self.num_requests = 0.0, 0
        self.orders: list[tuple[str, PlaceModules]] = []
        self.decodes = [f"d{n}" for n in range(len(hosts))]
        self.places = {name: ModulesPlace() for name in ("p0", *self.decodes)}
        self.num_tokens = dict.fromkeys(self.decodes, 0)
        self.keeping: set[str] = set()
        """Instances that refuse to take modules back."""
        self.computing: set[str] = set()
        """Requests whose prompts are computed without end."""
        self.prefill_use, self.prefill_s = 0.0, 0.0
        """The share of time in which the prefill instance computes, and its seconds so far."""
        self.tell(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
        self.tell(b"p0#1", member("p0", Role.PREFILL, prefill_host, why_not))
        for name, host in zip(self.decodes, hosts, strict=True):
            self.tell(f"{name}#1".encode(), member(name, Role.DECODE, host, why_not))

    def tell(self, sender: bytes, message: object) -> None:
        self.carry_out(self.conductor.handle(sender, message, self.now_s))  # type: ignore[arg-type]

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            name, message = effect.peer.decode().partition("#")[0], effect.message
            if isinstance(message, Reserve):
                self.tell(effect.peer, Reserved(message.ref, GRANT))
            elif isinstance(message, Prefill) and message.ref.request_id not in self.computing:
                self.tell(effect.peer, Prefilled(message.ref, 5, 0))
            elif isinstance(message, PlaceModules):
                self.orders.append((name, message))
                before = self.places[name]
                self.places[name] = ModulesPlace(message.epoch, message.number, message.helper, message.part)
                if not message.part:
                    self.places[name] = ModulesPlace(message.epoch, message.number)
                    if name in self.keeping:
                        self.places[name] = msgspec.structs.replace(before, number=message.number, error="no")

    def submit(self) -> None:
        """One request more, of some that are decoded all the time."""
        if self.num_requests == NUM_REQUESTS:
            return
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", [0] * 100, [], SamplingParams(5000), "ep")
        self.tell(FRONT, Submit(request))

    def pass_seconds(self, num: int, **used: tuple[int, float]) -> None:
        """Let heartbeats say what is used, by instance; 100 tokens and 5% where nothing is said."""
        for _ in range(num):
            self.now_s += 1.0
            self.tell(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
            self.submit()
            for name in self.decodes:
                num_tokens, memory = used.get(name, IDLE)
                self.num_tokens[name] += num_tokens
                self.beat(name, memory, self.num_tokens[name])
            self.prefill_s += self.prefill_use
            self.beat("p0", 0.0, 0, self.prefill_s)
            self.carry_out(self.conductor.tick(self.now_s))

    def beat(self, name: str, memory: float, num_tokens: int, prefill_s: float = 0.0) -> None:
        pools = {name: msgspec.structs.replace(POOL, num_pages=NUM_PAGES, num_free=NUM_PAGES)}
        num_free = round((1 - memory) * NUM_PAGES)
        stats = DecodeStats(num_tokens=num_tokens)
        beat = Heartbeat(1, 0, num_free, pools, prefill_s=prefill_s, decode=stats, modules=self.places[name])
        self.tell(f"{name}#1".encode(), beat)


def test_layers_of_a_busy_instance_go_to_an_idle_one_once() -> None:
    cluster = Cluster()
    cluster.pass_seconds(60, d0=BUSY)
    [(owner, order)] = cluster.orders
    assert (owner, order.helper in ("d1", "d2")) == ("d0", True)
    assert order.part.layers is not None
    assert order.part.layers.stop == 30
    assert 8 <= order.part.layers.count <= 15


def test_layers_go_to_a_prefill_instance_only_while_it_is_idle() -> None:
    cluster = Cluster(hosts=("host",), prefill_host="host")
    cluster.prefill_use = 1.0
    cluster.pass_seconds(5)
    cluster.pass_seconds(60, d0=(100, 0.9))
    assert cluster.orders == []
    cluster.prefill_use = 0.0
    cluster.pass_seconds(60, d0=(100, 0.9))
    [(owner, order)] = cluster.orders
    assert (owner, order.helper) == ("d0", "p0")
    assert order.part.layers is not None


def test_layers_of_a_busy_prefill_instance_go_to_an_idle_one_and_come_back() -> None:
    cluster = Cluster(hosts=("host",), prefill_host="host")
    cluster.prefill_use = 1.0
    cluster.pass_seconds(40)
    [(owner, order)] = cluster.orders
    assert (owner, order.helper) == ("p0", "d0")
    assert order.part.layers is not None
    assert 8 <= order.part.layers.count <= 15
    cluster.prefill_use = 0.1
    cluster.pass_seconds(40)
    assert [(owner, bool(order.part)) for owner, order in cluster.orders] == [("p0", True), ("p0", False)]


def test_layers_come_back_when_the_load_is_even_and_do_not_leave_at_once_again() -> None:
    cluster = Cluster()
    cluster.pass_seconds(40, d0=BUSY)
    cluster.pass_seconds(40)
    assert [(owner, order.part.layers is None) for owner, order in cluster.orders] == [
        ("d0", False),
        ("d0", True),
    ]
    since_s = cluster.now_s
    while len(cluster.orders) == 2:
        cluster.pass_seconds(1, d0=BUSY)
    assert cluster.now_s - since_s < MODULES_AGAIN_S + 3 * MODULES_PERIOD_S


def test_an_owner_that_takes_nothing_back_is_asked_now_and_then_while_other_modules_move() -> None:
    cluster = Cluster(hosts=("host",) * 4)
    cluster.keeping.add("d0")
    cluster.tell(FRONT, MoveModules(1, "d0", "d1", ModulesPart(share=0.5)))
    cluster.pass_seconds(60, d2=BUSY)
    assert [(owner, order.helper) for owner, order in cluster.orders] == [
        ("d0", "d1"),
        ("d0", "d1"),
        ("d2", "d3"),
    ]
    cluster.pass_seconds(60, d2=BUSY)
    assert [owner for owner, _ in cluster.orders] == ["d0", "d0", "d2", "d0"]


def test_a_hundred_quiet_periods_move_nothing() -> None:
    cluster, rng = Cluster(), random.Random(1)
    for _ in range(int(100 * MODULES_PERIOD_S)):
        used = {name: (rng.randint(800, 1000), rng.uniform(0.4, 0.6)) for name in cluster.decodes}
        cluster.pass_seconds(1, **used)
    assert cluster.orders == []


@pytest.mark.parametrize(
    "cluster",
    [
        lambda: Cluster(moves_modules=False),
        lambda: Cluster(hosts=("host", "other", "third")),
        lambda: Cluster(why_not="it has a GPU"),
    ],
)
def test_nothing_moves_where_it_is_off_or_between_hosts_or_without_support(cluster: object) -> None:
    made = cluster()  # type: ignore[operator]
    made.pass_seconds(40, d0=BUSY)
    assert made.orders == []


def test_an_instance_with_modules_elsewhere_keeps_its_role() -> None:
    cluster = Cluster()
    cluster.tell(FRONT, MoveModules(1, "d0", "d1", ModulesPart(1)))
    cluster.pass_seconds(2)
    survey = cluster.conductor.elasticity._survey
    assert survey._changeable() == {"d2"}


def test_no_module_moves_while_an_order_is_carried_out() -> None:
    """Also between the other instances, of which one is busy and one is idle."""
    cluster = Cluster(hosts=("host",) * 4)
    cluster.tell(FRONT, MoveModules(1, "d1", "d2", ModulesPart(1)))
    cluster.places["d1"] = ModulesPlace(EPOCH, 1, "d2", ModulesPart(1), is_moving=True)
    cluster.pass_seconds(40, d0=BUSY)
    assert [(owner, order.helper) for owner, order in cluster.orders] == [("d1", "d2")]
    cluster.places["d1"] = ModulesPlace(EPOCH, 1, "d2", ModulesPart(1))
    cluster.pass_seconds(20, d0=BUSY)
    assert [owner for owner, _ in cluster.orders] == ["d1", "d1", "d0"], "modules return, others leave"


def test_no_module_moves_while_a_role_changes() -> None:
    """Also between the other instances, of which one is busy and one is idle."""
    cluster = Cluster(limits=Limits(switch_timeout_s=3600))
    cluster.computing.add("r1")
    cluster.submit()
    decoding = {name: cluster.conductor.instances.get(name) for name in cluster.decodes}
    [switching] = [one for one in decoding.values() if one is not None and one.requests]
    busy, idle = (name for name in cluster.decodes if name != switching.name)
    cluster.tell(FRONT, ChangeRole(1, switching.name, Role.PREFILL))
    cluster.pass_seconds(60, **{busy: BUSY})
    assert switching.state is InstanceState.SWITCHING
    assert cluster.orders == []
    cluster.tell(FRONT, Cancel("r1"))
    assert switching.role is Role.PREFILL
    cluster.pass_seconds(20, **{busy: BUSY})
    [(owner, order)] = cluster.orders
    assert (owner, order.helper in (idle, switching.name)) == (busy, True)
