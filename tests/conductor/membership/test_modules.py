"""Orders to move modules: what is refused and why, and what is known of where they are."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conductor.effects import Effect
from conductor.membership.modules import AGAIN_AFTER_S, LONG_TRY_S, WANTED_BACK_S
from conductor.membership.operators import status_of
from conductor.policy import Conductor
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVLayout
from mooncake.messages.fronts import ClusterState, Rejected, Submit
from mooncake.messages.migration import LayerRange, ModulesPart, ModulesPlace, ModulesSupport, PlaceModules
from mooncake.messages.operators import ChangeRole, Drain, InstanceList, ListInstances, MoveModules, Ordered
from mooncake.messages.pools import Capacity, PoolShard
from mooncake.messages.workers import InstanceState, Register, Reserve, Reserved, Retire, Retired, Role
from tests.conductor.small_cluster import (
    EPOCH,
    FRONT,
    GRANT,
    HEARTBEAT,
    POOL,
    address,
    new_conductor,
    ref,
    registration,
    request,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
A, B, C = (peer_identity(name, 1) for name in "abc")


def able(name: str, role: Role = Role.DECODE, **changes: Any) -> Register:
    shard = PoolShard(address(name), LAYOUT)
    modules = ModulesSupport(f"/run/{name}", "")
    return msgspec.structs.replace(
        registration(name, role), **{"layout": LAYOUT, "shards": (shard,), "modules": modules, **changes}
    )


def far(endpoint: str = "") -> Register:
    """An instance on another host, which listens there for owners of other hosts."""
    shard = PoolShard(msgspec.structs.replace(address("far"), host_id="another"), LAYOUT)
    return able("far", shards=(shard,), modules=ModulesSupport("/run/far", "", endpoint))


@pytest.fixture
def conductor() -> Conductor:
    """One whose instances "a", "b" and "c" can have modules elsewhere."""
    conductor = new_conductor()
    for identity, name in ((A, "a"), (B, "b"), (C, "c")):
        conductor.handle(identity, able(name), 0.0)
    return conductor


def order(
    conductor: Conductor,
    owner: str,
    helper: str,
    part: int | LayerRange | ModulesPart,
    now_s: float = 1.0,
) -> tuple[Ordered, list[PlaceModules]]:
    if isinstance(part, int):
        part = ModulesPart(part)
    wanted = ModulesPart(layers=part) if isinstance(part, LayerRange) else part
    effects = conductor.handle(FRONT, MoveModules(1, owner, helper, wanted), now_s)
    orders = [effect.message for effect in effects if isinstance(effect.message, PlaceModules)]
    [answer] = [effect.message for effect in effects if isinstance(effect.message, Ordered)]
    return answer, orders


def tell(conductor: Conductor, identity: bytes, place: ModulesPlace) -> None:
    conductor.handle(identity, msgspec.structs.replace(HEARTBEAT, modules=place), 2.0)


def test_an_order_is_passed_on_and_modules_move_until_a_heartbeat_names_it(conductor: Conductor) -> None:
    answer, [placed] = order(conductor, "a", "b", 1)
    assert placed == PlaceModules(EPOCH, 1, "b", "/run/b", ModulesPart(1))
    assert answer.status is not None
    assert (answer.refusal, answer.status.modules.is_moving) == ("", True)
    tell(conductor, A, ModulesPlace())  # sent before the order came
    assert order(conductor, "a", "c", 1)[0].refusal == "modules of a are moving already"
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", ModulesPart(1), num_device_pages=133))
    answer, orders = order(conductor, "a", "b", 0)
    assert [(of.number, of.part) for of in orders] == [(2, ModulesPart())]
    assert answer.status is not None
    assert answer.status.num_device_pages == 133


def test_an_order_is_under_way_until_its_end_is_told(conductor: Conductor) -> None:
    order(conductor, "a", "b", 1)
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", is_moving=True))  # it has begun
    assert order(conductor, "a", "c", 1)[0].refusal == "modules of a are moving already"
    assert order(conductor, "b", "c", 1)[0].refusal == "b has modules of a itself"
    assert order(conductor, "c", "a", 1)[0].refusal == "modules of a are moving, so it cannot be a helper"
    for name, why in (("a", "modules of a are moving"), ("b", "b has modules of a")):
        [effect] = conductor.handle(FRONT, ChangeRole(3, name, Role.PREFILL, force=True), 3.0)
        assert isinstance(effect.message, Ordered)
        assert effect.message.refusal == why
    tell(conductor, A, ModulesPlace(EPOCH, 1, error="no room"))
    assert order(conductor, "a", "c", 1)[0].refusal == ""


def test_layers_go_and_come_back(conductor: Conductor) -> None:
    first = LayerRange(0, 1)
    answer, [placed] = order(conductor, "a", "b", first)
    assert (answer.refusal, placed) == ("", PlaceModules(EPOCH, 1, "b", "/run/b", ModulesPart(layers=first)))
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", ModulesPart(layers=first)))
    assert order(conductor, "a", "c", 1)[0].refusal == (
        "layers 0:1 of a are at b; take them back first (`mooncake-serve migrate a b --back`)"
    )
    _, [placed] = order(conductor, "a", "b", 0)
    assert placed == PlaceModules(EPOCH, 2, "b", "/run/b")


def test_fronts_are_told_of_another_number_of_pages_or_another_part_at_the_helper(
    conductor: Conductor,
) -> None:
    def told(place: ModulesPlace) -> list[object]:
        effects = conductor.handle(A, msgspec.structs.replace(HEARTBEAT, modules=place), 2.0)
        return [effect.message for effect in effects if isinstance(effect.message, ClusterState)]

    assert told(ModulesPlace(num_device_pages=50))
    assert not told(ModulesPlace(num_device_pages=50))
    moving = ModulesPlace(helper="b", is_moving=True, num_device_pages=60)
    assert told(moving)
    assert not told(moving)
    assert told(msgspec.structs.replace(moving, part=ModulesPart(share=0.5), is_moving=False))


def test_no_sequence_is_longer_than_what_fits_with_all_modules_nor_than_what_fits_now(
    conductor: Conductor,
) -> None:
    for identity in (A, B, C):
        tell(conductor, identity, ModulesPlace(num_device_pages=50))
    instance = conductor.instances.get("a")
    assert instance is not None
    assert instance.max_sequence_blocks == 50
    tell(conductor, A, ModulesPlace(num_device_pages=200))
    assert instance.max_sequence_blocks == 100
    capacity = msgspec.structs.replace(instance.registration.capacity, num_pool_pages=300)
    instance.registration = msgspec.structs.replace(instance.registration, capacity=capacity)
    assert instance.max_sequence_blocks == 100


def test_a_sequence_may_have_the_pages_of_a_helper_where_these_stay_as_long_as_it_needs_them(
    conductor: Conductor,
) -> None:
    half = ModulesPart(share=0.5)
    _, [placed] = order(conductor, "a", "b", half)
    assert placed == PlaceModules(EPOCH, 1, "b", "/run/b", half)
    instance = conductor.instances.get("a")
    assert instance is not None
    capacity = msgspec.structs.replace(instance.registration.capacity, num_pool_pages=300)
    instance.registration = msgspec.structs.replace(instance.registration, capacity=capacity)
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", half, num_device_pages=200))
    assert (instance.max_sequence_blocks, instance.max_prompt_blocks) == (200, 100)
    largest = conductor.instances.largest(Role.DECODE)
    assert largest is instance
    assert largest.can_hold(200 * 4, Role.DECODE)
    assert not largest.can_hold(101 * 4, Role.PREFILL)
    assert conductor.instances.max_sequence_blocks() == 100, "no instance can compute a longer prompt"
    assert order(conductor, "a", "c", 1)[0].refusal == (
        "the first 50% of sequences of a are at b; take them back first (`mooncake-serve migrate a b --back`)"
    )
    instance.role = Role.BOTH  # which computes the prompts of all its requests
    assert instance.max_sequence_blocks == 100
    instance.role = Role.DECODE
    tell(conductor, A, ModulesPlace(EPOCH, 2))
    assert instance.max_sequence_blocks == 100


def _drain(conductor: Conductor) -> None:
    conductor.handle(FRONT, Drain(2, "b", stays=True), 1.0)


def _switch(conductor: Conductor) -> None:
    """Let "b" begin to change its role. A request whose prompt is being computed keeps it from the end."""
    b = conductor.instances.get("b")
    assert b is not None
    for number in range(10):
        effects = conductor.handle(FRONT, Submit(request(f"r{number}")), 1.0)
        [placed] = [effect.peer for effect in effects if isinstance(effect.message, Reserve)]
        if placed == B:
            conductor.handle(B, Reserved(ref(request_id=f"r{number}"), GRANT), 1.0)
            break
    conductor.handle(FRONT, ChangeRole(2, "b", Role.PREFILL), 1.0)
    assert b.state is InstanceState.SWITCHING


def _to_b(conductor: Conductor) -> None:
    order(conductor, "a", "b", 1)
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", ModulesPart(1)))


@pytest.mark.parametrize(
    ("before", "owner", "helper", "part", "refusal"),
    [
        (None, "a", "x", 1, "no instance 'x' is registered; there are a, b, c, d0, p0"),
        (None, "x", "a", 1, "no instance 'x' is registered; there are a, b, c, d0, p0"),
        (None, "a", "a", 1, "a cannot be its own helper"),
        (None, "a", "b", 4, "the model has 4 KV heads, of which at most 3 can be elsewhere"),
        (None, "a", "b", 0, "nothing of a is at b"),
        (
            None,
            "a",
            "b",
            LayerRange(1, 3),
            "the model has layers 0:2, of which at least one stays; 1:3 cannot be elsewhere",
        ),
        (
            None,
            "a",
            "b",
            LayerRange(0, 2),
            "the model has layers 0:2, of which at least one stays; 0:2 cannot be elsewhere",
        ),
        (
            None,
            "a",
            "d0",
            LayerRange(0, 1),
            "layers neither leave nor come to d0: it has no support for that",
        ),
        (None, "a", "d0", 1, "KV heads neither leave nor come to d0: it has no support for that"),
        (
            None,
            "a",
            "far",
            1,
            "a and far are on different hosts, and far hosts KV heads of its own host only; set"
            " worker.modules_listen there",
        ),
        (
            None,
            "prefills",
            "a",
            1,
            "prefills prefills, so that layers of it can be at a helper, and no KV heads",
        ),
        (_drain, "a", "b", 1, "b is draining"),
        (_drain, "b", "a", 1, "b is draining"),
        (_switch, "a", "b", 1, "b is switching"),
        (_switch, "b", "a", 1, "b is switching"),
        (
            _to_b,
            "a",
            "c",
            1,
            "1 of the KV heads of a are at b; take them back first (`mooncake-serve migrate a b --back`)",
        ),
        (_to_b, "c", "a", 1, "1 of the KV heads of a are at b, so it cannot be a helper"),
        (_to_b, "b", "c", 1, "b has modules of a itself"),
    ],
)
def test_orders_that_cannot_be_carried_out(
    conductor: Conductor,
    before: Callable[[Conductor], None] | None,
    owner: str,
    helper: str,
    part: int | LayerRange,
    refusal: str,
) -> None:
    if before is not None:
        before(conductor)
    elif helper == "far":
        conductor.handle(peer_identity("far", 1), far(), 0.0)
    elif owner == "prefills":
        conductor.handle(peer_identity("prefills", 1), able("prefills", Role.PREFILL), 0.0)
    answer, orders = order(conductor, owner, helper, part)
    assert (answer.refusal, orders) == (refusal, [])


def test_a_helper_on_another_host_is_reached_at_its_endpoint(conductor: Conductor) -> None:
    conductor.handle(peer_identity("far", 1), far("tcp://10.0.0.2:7300"), 0.0)
    _, [placed] = order(conductor, "a", "far", 1)
    assert placed == PlaceModules(EPOCH, 1, "far", "tcp://10.0.0.2:7300", ModulesPart(1))
    assert order(conductor, "far", "b", 1)[0].refusal == (
        "far and b are on different hosts, and b hosts KV heads of its own host only; set"
        " worker.modules_listen there"
    )


def test_a_prefill_instance_is_a_helper_and_keeps_its_role_meanwhile(conductor: Conductor) -> None:
    identity = peer_identity("prefills", 1)
    conductor.handle(identity, able("prefills", Role.PREFILL), 0.0)
    conductor.handle(peer_identity("another", 1), able("another", Role.PREFILL), 0.0)
    answer, [placed] = order(conductor, "a", "prefills", 1)
    assert (answer.refusal, placed.helper) == ("", "prefills")
    tell(conductor, A, ModulesPlace(EPOCH, 1, "prefills", ModulesPart(1)))
    [effect] = conductor.handle(FRONT, ChangeRole(3, "prefills", Role.DECODE), 3.0)
    assert isinstance(effect.message, Ordered)
    assert effect.message.refusal == "prefills has modules of a"


def test_a_prefill_instance_has_layers_at_a_helper_and_keeps_its_role_meanwhile(conductor: Conductor) -> None:
    for name in ("prefills", "another"):
        conductor.handle(peer_identity(name, 1), able(name, Role.PREFILL), 0.0)
    part = ModulesPart(layers=LayerRange(0, 1))
    answer, [placed] = order(conductor, "prefills", "a", part)
    assert (answer.refusal, placed) == ("", PlaceModules(EPOCH, 1, "a", "/run/a", part))
    tell(conductor, peer_identity("prefills", 1), ModulesPlace(EPOCH, 1, "a", part))
    [effect] = conductor.handle(FRONT, ChangeRole(3, "prefills", Role.DECODE), 3.0)
    assert isinstance(effect.message, Ordered)
    assert effect.message.refusal == "layers 0:1 of prefills are at a"
    refusal = order(conductor, "another", "a", ModulesPart(share=0.5))[0].refusal
    assert refusal == "another prefills, so that layers of it can be at a helper, and no pages of sequences"


def test_neither_owner_nor_helper_changes_its_role(conductor: Conductor) -> None:
    _to_b(conductor)
    for name, why in (("a", "1 of the KV heads of a are at b"), ("b", "b has modules of a")):
        [effect] = conductor.handle(FRONT, ChangeRole(3, name, Role.PREFILL, force=True), 3.0)
        assert isinstance(effect.message, Ordered)
        assert effect.message.refusal == why


@pytest.mark.parametrize(("owner", "helper"), [("a", "b"), ("b", "a")], ids=["helper", "owner"])
def test_modules_move_again_when_a_change_of_the_role_is_given_up(
    conductor: Conductor, owner: str, helper: str
) -> None:
    _switch(conductor)
    conductor.handle(FRONT, Drain(3, "b", is_wanted=False), 2.0)
    answer, orders = order(conductor, owner, helper, 1)
    assert (answer.refusal, [placed.number for placed in orders]) == ("", [1])


def test_a_helper_that_drains_has_the_modules_go_back_first(conductor: Conductor) -> None:
    _to_b(conductor)
    effects = conductor.handle(FRONT, Drain(2, "b", stays=True), 3.0)
    assert [effect.message for effect in effects if effect.peer == A] == [
        PlaceModules(EPOCH, 2, "b", "/run/b")
    ]


def test_a_helper_that_leaves_does_so_when_the_modules_are_back(conductor: Conductor) -> None:
    """Also if they are just coming, and if the owner refuses at first."""

    def sent(effects: list[Effect]) -> list[object]:
        return [effect.message for effect in effects if isinstance(effect.message, PlaceModules | Retired)]

    order(conductor, "a", "b", 1)
    assert not sent(conductor.handle(B, Retire(), 2.0)), "no second order while the first one is under way"
    tell(conductor, A, ModulesPlace(EPOCH, 1, "b", ModulesPart(1)))
    [again] = sent(conductor.tick(2.5))
    assert again == PlaceModules(EPOCH, 2, "b", "/run/b")
    assert not sent(conductor.tick(3.0))
    tell(conductor, A, ModulesPlace(EPOCH, 2, "b", ModulesPart(1), error="a request needs 300 pages"))
    assert sent(conductor.tick(3.5)) == [PlaceModules(EPOCH, 3, "b", "/run/b")]
    back = msgspec.structs.replace(HEARTBEAT, modules=ModulesPlace(EPOCH, 3))
    assert sent(conductor.handle(A, back, 4.0)) == [Retired(False)]


class LongRequests:
    """A conductor whose instance "a" has pages at "b"; each request of 101 blocks needs some of them."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        instance = conductor.instances.get("a")
        assert instance is not None
        self.instance = instance
        capacity = msgspec.structs.replace(instance.registration.capacity, num_pool_pages=300)
        instance.registration = msgspec.structs.replace(instance.registration, capacity=capacity)
        self.place = ModulesPlace(EPOCH, 1, "b", ModulesPart(share=0.5), num_device_pages=200)
        order(conductor, "a", "b", self.place.part)
        self.beat()

    def beat(self, now_s: float = 2.0, **changes: Any) -> list[object]:
        """Pass on a heartbeat of the owner. Returns what fronts are told."""
        self.place = msgspec.structs.replace(self.place, **changes)
        pool = msgspec.structs.replace(POOL, num_pages=300, num_free=300)
        heartbeat = msgspec.structs.replace(HEARTBEAT, pools={"a": pool}, modules=self.place)
        effects = self._conductor.handle(A, heartbeat, now_s)
        return [effect.message for effect in effects if isinstance(effect.message, ClusterState)]

    def submitted(self, request_id: str) -> list[tuple[bytes, object]]:
        """Submit a request. Returns the messages that follow."""
        effects = self._conductor.handle(FRONT, Submit(request(request_id, 100 * 4)), 2.0)
        return [(effect.peer, type(effect.message)) for effect in effects]


def test_no_request_is_longer_than_fits_without_a_helper_that_drains(conductor: Conductor) -> None:
    """It would keep the helper's pages from coming back, also before the owner's next heartbeat."""
    long = LongRequests(conductor)
    assert long.submitted("first") == [(A, Reserve)]
    _drain(conductor)
    assert long.submitted("second") == [(FRONT, Rejected)]
    assert long.instance.max_sequence_blocks == 100
    long.beat(number=2, error="a request may need 101 pages")
    assert long.submitted("third") == [(FRONT, Rejected)]
    conductor.handle(FRONT, Drain(3, "b", is_wanted=False), 2.0)
    assert long.submitted("fourth") == [(A, Reserve)]


def test_pages_that_an_operator_wants_back_are_needed_by_no_further_request(conductor: Conductor) -> None:
    """The order is repeated until the requests that need them have ended. No heartbeat is waited for."""

    def sent(effects: list[Effect]) -> list[object]:
        return [effect.message for effect in effects if isinstance(effect.message, PlaceModules)]

    long = LongRequests(conductor)
    assert long.submitted("first") == [(A, Reserve)]
    _, [placed] = order(conductor, "a", "b", 0)
    assert placed == PlaceModules(EPOCH, 2, "b", "/run/b")
    assert long.submitted("second") == [(FRONT, Rejected)]
    assert not sent(conductor.tick(2.0))
    long.beat(number=2, error="a request may need 101 pages")
    status = status_of(long.instance, 2.0).modules
    assert (status.is_moving, status.error) == (True, "a request may need 101 pages")
    assert sent(conductor.tick(2.5)) == [PlaceModules(EPOCH, 3, "b", "/run/b")]
    assert long.submitted("third") == [(FRONT, Rejected)]
    assert long.beat(number=3, helper="", part=ModulesPart(), error="", num_device_pages=100)
    assert not status_of(long.instance, 2.0).modules.is_moving
    assert not sent(conductor.tick(3.0))
    order(conductor, "a", "b", ModulesPart(share=0.5))
    long.beat(number=4, helper="b", part=ModulesPart(share=0.5), num_device_pages=200)
    assert long.submitted("fourth") == [(A, Reserve)]


@pytest.mark.parametrize("is_drained", [False, True], ids=["wanted back", "drained"])
def test_a_long_request_goes_to_an_instance_whose_pages_stay(conductor: Conductor, is_drained: bool) -> None:
    large = peer_identity("large", 1)
    conductor.handle(large, able("large", capacity=Capacity(300, 300, 256)), 0.0)
    long = LongRequests(conductor)
    assert {long.submitted(name)[0][0] for name in "rstu"} == {A, large}
    if is_drained:
        _drain(conductor)
    else:
        order(conductor, "a", "b", 0)
    assert {long.submitted(name)[0][0] for name in "wxyz"} == {large}


def test_pages_can_be_ordered_back_again_whether_or_not_an_order_is_in_flight(conductor: Conductor) -> None:
    long = LongRequests(conductor)
    order(conductor, "a", "b", 0)
    answer, orders = order(conductor, "a", "b", 0)
    assert (answer.refusal, orders) == ("", [])
    long.beat(number=2, error="a request may need 101 pages")
    answer, orders = order(conductor, "a", "b", 0, now_s=3.0)
    assert (answer.refusal, [placed.number for placed in orders]) == ("", [3])
    assert long.instance.wanted_back_until_s == 3.0 + WANTED_BACK_S
    assert order(conductor, "a", "c", 0)[0].refusal == "modules of a are moving already"


def test_an_order_that_was_tried_in_vain_is_repeated_only_after_a_pause(conductor: Conductor) -> None:
    """Each such try preempts requests."""
    long = LongRequests(conductor)
    order(conductor, "a", "b", 0)
    refused_s = 1.0 + LONG_TRY_S
    long.beat(number=2, error="pages beyond the 100 were not freed", now_s=refused_s)
    assert not any(isinstance(effect.message, PlaceModules) for effect in conductor.tick(refused_s + 0.5))
    again_s = refused_s + AGAIN_AFTER_S
    [placed] = [one.message for one in conductor.tick(again_s) if isinstance(one.message, PlaceModules)]
    assert placed == PlaceModules(EPOCH, 3, "b", "/run/b")


def test_pages_are_wanted_back_while_the_conductor_does_not_know_the_helper(conductor: Conductor) -> None:
    """As when the link between the Conductor and the helper is lost for a while."""
    long = LongRequests(conductor)
    order(conductor, "a", "b", 0)
    conductor.peer_gone(B, 2.0)
    long.beat(number=2, error="a request may need 101 pages")
    assert long.instance.helper is None
    assert long.submitted("first") == [(FRONT, Rejected)]
    assert not any(isinstance(effect.message, PlaceModules) for effect in conductor.tick(2.0))
    conductor.handle(B, able("b"), 2.0)
    long.beat()
    assert any(isinstance(effect.message, PlaceModules) for effect in conductor.tick(2.5))


def test_pages_are_wanted_back_for_a_limited_time(conductor: Conductor) -> None:
    long = LongRequests(conductor)
    order(conductor, "a", "b", 0)
    conductor.tick(2.0)
    long.beat(number=2, error="a request may need 101 pages")
    told = conductor.tick(1.0 + WANTED_BACK_S)
    assert [effect.peer for effect in told if isinstance(effect.message, ClusterState)] == [FRONT]
    assert not any(isinstance(effect.message, PlaceModules) for effect in told)
    assert status_of(long.instance, 2.0).modules == long.place
    assert long.submitted("first") == [(A, Reserve)]


def test_another_conductor_learns_where_modules_are(conductor: Conductor) -> None:
    tell(conductor, A, ModulesPlace(EPOCH - 1, 9, "b", ModulesPart(2)))
    answer, [placed] = order(conductor, "a", "b", 0)
    assert (answer.refusal, placed.part) == ("", ModulesPart())


def test_modules_of_an_earlier_conductors_instance_move_until_its_first_heartbeat(
    conductor: Conductor,
) -> None:
    again = peer_identity("a", 2)
    conductor.handle(again, able("a", incarnation=2, epoch=EPOCH - 1), 1.0)
    answer, orders = order(conductor, "a", "b", 1)
    assert (answer.refusal, orders) == ("modules of a are moving already", [])
    [listed] = conductor.handle(FRONT, ListInstances(2), 1.0)
    assert isinstance(listed.message, InstanceList)
    assert listed.message.epoch == EPOCH
    assert [one.name for one in listed.message.instances if one.modules.is_moving] == ["a"]
    tell(conductor, again, ModulesPlace())
    assert order(conductor, "a", "b", 1)[0].refusal == ""
