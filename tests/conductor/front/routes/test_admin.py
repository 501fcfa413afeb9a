"""Operators' routes: what they tell the Conductor, and what becomes of its answer."""

import httpx
import msgspec
import pytest

from mooncake.messages.migration import ModulesPart, ModulesPlace
from mooncake.messages.operators import ChangeRole, Drain, MoveModules
from mooncake.messages.workers import Role
from tests.conductor.front.fakes import Running
from tests.deadline import DEADLINE_S


def migrate(front: Running, request_id: str, **query: str) -> httpx.Response:
    path = f"{front.url}/admin/requests/{request_id}/migrate"
    return httpx.post(path, params=query, timeout=DEADLINE_S)


def test_an_operator_moves_a_request(front: Running) -> None:
    answer = migrate(front, "r", to="d1")
    assert (answer.status_code, answer.json()) == (200, {"id": "r", "source": "d0", "destination": "d1"})


@pytest.mark.parametrize(
    ("request_id", "query", "status", "code"),
    [
        ("r", {"to": "d2"}, 409, "cannot_migrate"),
        ("r", {}, 409, "cannot_migrate"),
        ("another", {"to": "d1"}, 404, "unknown_request"),
    ],
)
def test_a_request_that_stays_is_told_with_the_reason(
    front: Running, request_id: str, query: dict[str, str], status: int, code: str
) -> None:
    answer = migrate(front, request_id, **query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert request_id in answer.json()["error"]["message"]


STATUS = {
    "name": "d0",
    "role": "decode",
    "state": "draining",
    "num_requests": 3,
    "next_role": None,
    "num_moved": 2,
    "num_blocks_left": 0,
    "since_s": 0.0,
    "stays": False,
    "modules": msgspec.to_builtins(ModulesPlace()),
    "num_device_pages": 0,
}


def order(front: Running, path: str, **query: str) -> httpx.Response:
    return httpx.post(f"{front.url}/admin/instances/{path}", params=query, timeout=DEADLINE_S)


def test_an_operator_sees_all_instances(front: Running) -> None:
    answer = httpx.get(f"{front.url}/admin/instances", timeout=DEADLINE_S)
    assert (answer.status_code, answer.json()) == (200, {"instances": [STATUS], "epoch": 3})


def test_orders_are_passed_on_and_answered_with_the_state(front: Running) -> None:
    for path, query in (
        ("d0/drain", {"force": "true"}),
        ("d0/drain", {"force": "true", "stay": "true"}),
        ("d0/role", {"force": "true", "role": "both"}),
        ("d0/heads", {"to": "d1", "num": "2"}),
        ("d0/sequences", {"to": "d1", "share": "0.5"}),
        ("d0/back", {"from": "d1"}),
    ):
        answer = order(front, path, **query)
        assert (answer.status_code, answer.json()) == (200, STATUS)
    drain, stay, role, heads, sequences, back = front.cluster.orders
    assert drain == Drain(drain.order, "d0", force=True)
    assert stay == Drain(stay.order, "d0", force=True, stays=True)
    assert role == ChangeRole(role.order, "d0", Role.BOTH, force=True)
    assert heads == MoveModules(heads.order, "d0", "d1", ModulesPart(2))
    assert sequences == MoveModules(sequences.order, "d0", "d1", ModulesPart(share=0.5))
    assert back == MoveModules(back.order, "d0", "d1")
    assert len({one.order for one in front.cluster.orders}) == 6


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("d0/drain", {}, 409, "refused"),
        ("d0/role", {"role": "prefill"}, 409, "refused"),
        ("d0/serve", {}, 409, "refused"),
        ("nobody/drain", {}, 404, "unknown_instance"),
        ("d0/role", {}, 400, None),
        ("d0/role", {"role": "conductor"}, 400, None),
        ("d0/drain", {"force": "perhaps"}, 400, None),
        ("d0/heads", {"to": "d1", "num": "0"}, 400, None),
        ("d0/back", {}, 400, None),
        ("d0/sequences", {"to": "d1", "share": "1"}, 400, None),
    ],
)
def test_orders_that_are_not_obeyed_are_told_with_the_reason(
    front: Running, path: str, query: dict[str, str], status: int, code: str | None
) -> None:
    answer = order(front, path, **query)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["message"]
    if status == 400:
        params = {"role": "role", "drain": "force", "heads": "num", "sequences": "share", "back": "from"}
        assert error["param"] == params[path.partition("/")[2]]


def test_an_older_conductor_is_not_asked_to_move_modules(front: Running) -> None:
    front.publish(msgspec.structs.replace(front.cluster.state, num_decode=2, version=27))
    answer = order(front, "d0/heads", to="d1", num="1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "refused")
    assert front.cluster.orders == []


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("instances/d0/drain?Stay=true", "Stay", "did you mean stay"),
        ("instances/d0/drain?fource=true&stay=true", "fource", "did you mean force"),
        ("instances/d0/drain?stay=true&stay=false", "stay", "more than once"),
        ("instances/d0/role?role=both&role=decode", "role", "more than once"),
        ("instances/d0/role?Role=both", "Role", "did you mean role"),
        ("instances/d0/serve?force=true", "force", "expected none"),
        ("instances/d0/back?to=d1", "to", "expected from"),
        ("requests/r/migrate?to=d1&to=d2", "to", "more than once"),
        ("requests/r/migrate?instance=d1", "instance", "expected to"),
        (f"requests/r/migrate?{'x' * 9_999}=d1", None, "unknown parameter"),
    ],
)
def test_orders_with_a_parameter_that_means_nothing_are_not_passed_on(
    front: Running, path: str, param: str | None, message: str
) -> None:
    answer = httpx.post(f"{front.url}/admin/{path}", timeout=DEADLINE_S)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert param is None or error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 300
    assert not front.cluster.orders
