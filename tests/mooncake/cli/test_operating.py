"""`mooncake-serve drain`, `role` and `migrate`: what they order, when they end, how errors are told."""

from pathlib import Path

import httpx
import msgspec
import pytest

from mooncake.cli import operating
from mooncake.cli.commands import run
from mooncake.cli.operating import AdminClient, change_role, drain, migrate
from mooncake.errors import MooncakeError
from mooncake.messages.migration import LayerRange, ModulesPart, ModulesPlace
from mooncake.messages.operators import InstanceStatus
from mooncake.messages.workers import InstanceState, Role
from tests.ports import free_port

URL = "http://front:8000"


def status(state: str, role: Role = Role.DECODE, **fields: int) -> InstanceStatus:
    return InstanceStatus("decode-0", role, InstanceState(state), fields.pop("num_requests", 0), **fields)


class Restart:
    """The end of a Conductor, and the begin of another one."""


class Server:
    """Tells one list of instances after the other, the last one for ever, and answers an order.

    Behind a `Restart` another Conductor has the instances.
    """

    def __init__(
        self, *lists: list[InstanceStatus] | Exception | Restart, refusal: httpx.Response | None = None
    ) -> None:
        self._lists, self._refusal, self._epoch = list(lists), refusal, 1
        self.orders: list[str] = []
        self.key: str | None = None

    def client(self, key: str | None = None) -> AdminClient:
        return AdminClient(URL, key, httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.key = request.headers.get("authorization")
        if request.method == "POST":
            self.orders.append(str(request.url).removeprefix(URL))
            return self._refusal or httpx.Response(200, content=b"{}")
        while isinstance(self._lists[0], Restart):
            self._epoch += 1
            del self._lists[0]
        told = self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]
        if isinstance(told, Exception):
            raise told
        return httpx.Response(200, content=msgspec.json.encode({"instances": told, "epoch": self._epoch}))


def refusal(status_code: int, message: str, code: str | None = None) -> httpx.Response:
    return httpx.Response(status_code, json={"error": {"message": message, "code": code}})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating, "POLL_S", 0.0)


def test_drain_waits_until_the_instance_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server([status("draining", num_requests=3)], [status("retired")], [])
    assert drain(server.client("secret"), "decode-0", force=True) == 0
    assert server.orders == ["/admin/instances/decode-0/drain?force=true"]
    assert server.key == "Bearer secret"
    assert capsys.readouterr().out == "decode-0 has left\n"


def test_role_waits_until_the_instance_serves_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server([status("switching", num_requests=1)], [status("serving", Role.PREFILL)])
    assert change_role(server.client(), "decode-0", Role.PREFILL, force=False) == 0
    assert server.orders == ["/admin/instances/decode-0/role?role=prefill&force=false"]
    assert server.key is None
    assert capsys.readouterr().out == "decode-0 serves as prefill\n"


def test_a_drain_that_is_taken_back_is_an_error() -> None:
    with pytest.raises(MooncakeError, match="decode-0 is serving again"):
        drain(Server([status("draining")], [status("serving")]).client(), "decode-0", force=False)


def test_a_drain_after_which_the_instance_is_to_stay_is_an_error() -> None:
    stays = msgspec.structs.replace(status("draining"), stays=True)
    with pytest.raises(MooncakeError, match="decode-0 drains, but will not leave"):
        drain(Server([status("draining")], [stays]).client(), "decode-0", force=False)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ([status("serving")], "still has the role decode: it could not finish its requests in time"),
        ([status("draining")], "still has the role decode: it is draining"),
        ([], "decode-0 is lost"),
    ],
)
def test_a_switch_that_comes_to_nothing_is_an_error(then: list[InstanceStatus], told: str) -> None:
    server = Server([status("switching")], then)
    with pytest.raises(MooncakeError, match=told):
        change_role(server.client(), "decode-0", Role.PREFILL, force=False)


TAIL = LayerRange(3, 8)
HALF = "the first 50% of sequences of decode-0 are at d1"


def part_of(part: int | LayerRange | float) -> ModulesPart:
    if isinstance(part, float):
        return ModulesPart(share=part)
    return ModulesPart(part) if isinstance(part, int) else ModulesPart(layers=part)


def moved(
    helper: str = "", part: int | LayerRange | float = 0, *, error: str = "", is_moving: bool = False
) -> list[InstanceStatus]:
    place = ModulesPlace(helper=helper, part=part_of(part), error=error, is_moving=is_moving)
    num_pages = 100 + place.part.num_heads
    return [msgspec.structs.replace(status("serving"), modules=place, num_device_pages=num_pages)]


@pytest.mark.parametrize(
    ("part", "ordered", "at_first", "at_last", "told"),
    [
        (1, "heads?to=d1&num=1", moved(), moved("d1", 1), "1 of the KV heads of decode-0 is at d1"),
        (2, "heads?to=d1&num=2", moved(), moved("d1", 2), "2 of the KV heads of decode-0 are at d1"),
        (TAIL, "layers?to=d1&layers=3%3A8", moved(), moved("d1", TAIL), "layers 3:8 of decode-0 are at d1"),
        (0.5, "sequences?to=d1&share=0.5", moved(), moved("d1", 0.5), HALF),
        (0, "back?from=d1", moved("d1", 0.5), moved(), "all modules of decode-0 are there"),
        (0, "back?from=d1", moved("d1", 2), moved(), "all modules of decode-0 are there"),
        (0, "back?from=d1", moved("d1", TAIL), moved(), "all modules of decode-0 are there"),
    ],
)
def test_migrate_waits_until_the_move_is_complete(
    part: int | LayerRange | float,
    ordered: str,
    at_first: list[InstanceStatus],
    at_last: list[InstanceStatus],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    moving = [
        msgspec.structs.replace(one, modules=msgspec.structs.replace(one.modules, is_moving=True))
        for one in at_first
    ]
    server = Server(moving, moving, at_last)
    assert migrate(server.client(), "decode-0", "d1", part_of(part)) == 0
    assert server.orders == [f"/admin/instances/decode-0/{ordered}"]
    num_pages = 100 + at_last[0].modules.part.num_heads
    assert capsys.readouterr().out == f"{told}; decode-0 has {num_pages} pages\n"


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (moved(error="d1 has no room: ..."), "d1 has no room"),
        (moved("d2", 1), "another order has been given for decode-0"),
        ([], "decode-0 is lost"),
    ],
)
def test_a_move_that_fails_is_an_error(then: list[InstanceStatus], told: str) -> None:
    server = Server(moved(is_moving=True), then)
    with pytest.raises(MooncakeError, match=told):
        migrate(server.client(), "decode-0", "d1", ModulesPart(1))


def test_an_instance_that_another_conductor_does_not_know_yet_has_not_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server(moved(is_moving=True), Restart(), [], [], moved("d1", TAIL))
    assert migrate(server.client(), "decode-0", "d1", part_of(TAIL)) == 0
    assert capsys.readouterr().out == "layers 3:8 of decode-0 are at d1; decode-0 has 100 pages\n"
    server = Server([status("draining")], Restart(), [], [status("serving")])
    with pytest.raises(MooncakeError, match="decode-0 is serving again: the order was taken back, or lost"):
        drain(server.client(), "decode-0", force=False)


def test_an_instance_that_does_not_register_with_another_conductor_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operating, "REGISTERED_AGAIN_S", 0.0)
    with pytest.raises(MooncakeError, match="decode-0 is lost"):
        migrate(Server(moved(is_moving=True), Restart(), []).client(), "decode-0", "d1", ModulesPart(1))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(404, "no instance 'x' is registered; there are a, b", "unknown_instance"), "there are a, b"),
        (refusal(409, "a is the last one; `force` drains it all the same", "refused"), "; --force drains"),
        (refusal(401, "a key is missing"), "a key is missing (--key-file FILE"),
        (refusal(403, "not from there", "not_local"), "not from there (--key-file FILE"),
        (refusal(404, "there is no POST /admin/instances/x/drain here"), "http.admin_listen says where"),
        (httpx.Response(404, text="<html>nginx</html>"), f"{URL} is no mooncake-serve"),
    ],
)
def test_what_is_refused_is_told_with_what_to_do(answer: httpx.Response, told: str) -> None:
    with pytest.raises(MooncakeError) as error:
        drain(Server([], refusal=answer).client(), "x", force=False)
    assert told in str(error.value)


def test_a_front_that_is_silent_for_a_moment_ends_nothing() -> None:
    silent = httpx.ConnectError("refused")
    assert drain(Server([status("draining")], silent, silent, []).client(), "decode-0", force=False) == 0


def test_a_front_that_stays_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating, "MOST_MISSED_S", 0.0)
    with pytest.raises(MooncakeError, match=f"no server answers at {URL}"):
        drain(Server([status("draining")], httpx.ConnectError("refused")).client(), "decode-0", force=False)


def test_ctrl_c_says_that_the_order_is_carried_out_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(operating.time, "sleep", interrupt)
    assert drain(Server([status("draining")]).client(), "decode-0", force=False) == 130
    assert "decode-0 goes on draining" in capsys.readouterr().err


def test_errors_are_one_line_with_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for arguments, code, told in (
        (["drain", "x", "--url", nowhere], 1, f"no server answers at {nowhere}"),
        (["drain", "x", "--url", "localhost:8000"], 1, "expected http://HOST:PORT"),
        (["role", "x", "both", "--url", "ftp://h"], 1, "expected http://HOST:PORT"),
        (["drain", "x", "--key-file", str(tmp_path / "no.key")], 2, "no.key"),
        (["--port", "3", "drain", "x"], 2, "drain takes INSTANCE and what its --help shows alone"),
    ):
        assert run(arguments) == code
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
