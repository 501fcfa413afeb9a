"""Who may look at the dashboard and drain instances: with keys anywhere, an admin's key alone."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.messages.fronts import KeepContext
from mooncake.security.api_keys import add_api_key
from tests.conductor.front.fakes import DEADLINE_S, byte_model, running_front
from tests.conductor.small_cluster import FRONT
from tests.conductor.telemetry.test_display import Shown
from tests.ports import free_port

CONTEXT_ID = "cache-of-somebody"
DASHBOARD, DRAIN = "/dashboard/state", "/admin/instances/p0/drain"


class Guarded:
    """A front beside a Conductor that keeps somebody's context cache, and who asks it."""

    def __init__(self, url: str, admin_url: str, keys: dict[str, str]) -> None:
        self.url, self.admin_url, self.keys = url, admin_url, keys

    def look(self, who: str = "", path: str = DASHBOARD) -> httpx.Response:
        return httpx.get(self.admin_url + path, headers=self._headers(who), timeout=DEADLINE_S)

    def drain(self, who: str = "", **headers: str) -> httpx.Response:
        given = {**self._headers(who), **headers}
        return httpx.post(self.admin_url + DRAIN, headers=given, timeout=DEADLINE_S)

    def _headers(self, who: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[who]}"} if who else {}


@contextmanager
def guarded(folder: Path, *files: str, has_listener: bool) -> Iterator[Guarded]:
    keys = {name: add_api_key(folder / name, name, {}) for name in ("api", "admin")}
    config: dict[str, Any] = {f"{name}_keys_file": folder / name for name in files}
    port = free_port()
    if has_listener:
        config["admin_listen"] = f"127.0.0.1:{port}"
    shown = Shown()
    shown.hear(FRONT, KeepContext(CONTEXT_ID, [b"k" * 16], 60.0))
    with running_front(folder, byte_model(), shown.display, **config) as front:
        yield Guarded(front.url, f"http://127.0.0.1:{port}" if has_listener else front.url, keys)


@pytest.mark.parametrize("has_listener", [False, True], ids=["beside the API", "own listener"])
@pytest.mark.parametrize("files", [("admin",), ("api", "admin")], ids=" and ".join)
def test_an_admins_key_alone_opens_what_tells_of_all_tenants(
    tmp_path: Path, files: tuple[str, ...], has_listener: bool
) -> None:
    with guarded(tmp_path, *files, has_listener=has_listener) as front:
        for who in ("", "api"):
            answers = {
                "Basic": [
                    front.look(who),
                    front.look(who, "/dashboard"),
                    front.look(who, "/dashboard/requests/r"),
                ],
                "Bearer": [front.drain(who)],
            }
            for challenge, refused in answers.items():
                for answer in refused:
                    assert answer.status_code == 401, (who, answer.url)
                    assert answer.headers["www-authenticate"].startswith(challenge)
                    assert CONTEXT_ID not in answer.text
        assert CONTEXT_ID in front.look("admin").text
        # A proxy on the machine may pass it on: the key is what counts.
        for headers in ({}, {"X-Forwarded-For": "10.0.0.1"}):
            assert front.drain("admin", **headers).json()["error"]["code"] == "unknown_instance"
        assert httpx.get(f"{front.admin_url}/metrics", timeout=DEADLINE_S).status_code == 200


@pytest.mark.parametrize("has_listener", [False, True], ids=["beside the API", "own listener"])
def test_where_clients_have_keys_and_admins_have_none_it_is_closed(
    tmp_path: Path, has_listener: bool
) -> None:
    with guarded(tmp_path, "api", has_listener=has_listener) as front:
        for who in ("", "api", "admin"):
            for answer in (front.look(who), front.drain(who)):
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_keys")
                assert "--http-admin-keys-file" in answer.json()["error"]["message"]


def test_a_browser_gives_an_admins_key_as_a_password(tmp_path: Path) -> None:
    with guarded(tmp_path, "api", "admin", has_listener=False) as front:
        logins = {"api": 401, "admin": 200}
        for who, status in logins.items():
            for _ in range(2):
                answer = httpx.get(
                    front.url + DASHBOARD, auth=("anyone", front.keys[who]), timeout=DEADLINE_S
                )
                assert answer.status_code == status
        for garbage in ("Basic ,", "Basic " + base64.b64encode(b"\xff").decode(), "Bearer"):
            answer = httpx.get(front.url + DASHBOARD, headers={"authorization": garbage}, timeout=DEADLINE_S)
            assert answer.status_code == 401
        basic = httpx.get(f"{front.url}/v1/models", auth=("anyone", front.keys["api"]), timeout=DEADLINE_S)
        assert basic.status_code == 401


def test_who_looks_after_the_cluster_has_a_listener_of_their_own(tmp_path: Path) -> None:
    with guarded(tmp_path, "api", "admin", has_listener=True) as front:

        def status(url: str, who: str) -> int:
            headers = {"authorization": f"Bearer {front.keys[who]}"}
            return httpx.get(url, headers=headers, timeout=DEADLINE_S).status_code

        paths = ("/metrics", "/dashboard", DASHBOARD)
        assert [status(front.url + path, "api") for path in paths] == [404, 404, 404]
        assert [status(f"{front.url}/v1/models", who) for who in ("api", "admin")] == [200, 401]
        assert status(f"{front.admin_url}/v1/models", "admin") == 404
        assert httpx.post(front.url + DRAIN, timeout=DEADLINE_S).status_code == 404


def test_without_any_key_only_who_sits_at_the_machine_may_drain(tmp_path: Path) -> None:
    with guarded(tmp_path, has_listener=False) as front:
        assert CONTEXT_ID in front.look().text
        assert front.drain().json()["error"]["code"] == "unknown_instance", "it gets as far as the conductor"
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin"):
            refused = front.drain(**{header: "127.0.0.1"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_local"), header
