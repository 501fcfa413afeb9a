"""What a browser is shown: where things are, and the API, without the internet."""

import re
from pathlib import Path

import httpx
import pytest

from conductor.front.access.access import OPEN_PATHS
from mooncake.security.api_keys import LIMITS, add_api_key
from tests.conductor.front.fakes import MODEL_NAME, Running, byte_model, running_front
from tests.deadline import DEADLINE_S

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def get(front: Running, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(f"{front.url}{path}", headers=headers, timeout=DEADLINE_S)


def test_a_program_is_told_what_this_is_and_where_to_go(front: Running) -> None:
    answer = get(front, "/")
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert (told["name"], told["model"]) == ("mooncake-serve", MODEL_NAME)
    assert told["version"] == get(front, "/version").json()["version"]
    assert {"docs", "openapi", "models", "health", "ready", "metrics"} <= set(told["links"])
    for path in told["links"].values():
        assert get(front, path).status_code == 200, path


def test_a_browser_gets_a_page_with_the_same_links(front: Running) -> None:
    answer = get(front, "/", BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    links = set(re.findall(r'href="\.(/[^"]*)"', answer.text))
    assert links == set(get(front, "/").json()["links"].values())


def test_a_front_without_a_conductor_links_no_dashboard(front: Running) -> None:
    assert "dashboard" not in get(front, "/").json()["links"]


def test_paths_of_admins_that_are_elsewhere_are_not_linked(tmp_path: Path) -> None:
    with running_front(tmp_path, byte_model(), admin_listen="127.0.0.1:0") as front:
        assert "metrics" not in get(front, "/").json()["links"]


def test_the_api_is_shown_without_the_internet(front: Running) -> None:
    page = get(front, "/docs", BROWSER)
    assert "SwaggerUIBundle" in page.text
    loaded = re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)["']""", page.text)
    assert loaded
    assert not [address for address in loaded if "//" in address]
    assert '"validatorUrl": null' in page.text
    assert "http" not in page.headers["content-security-policy"]
    for address in loaded:
        answer = get(front, str(httpx.URL(f"{front.url}/docs").join(address).path))
        assert answer.status_code == 200, address
        assert len(answer.content) > 1000, address


def test_the_api_is_shown_to_those_with_a_key_alone_if_there_are_keys(tmp_path: Path) -> None:
    key = add_api_key(tmp_path / "keys.yaml", "alice", dict.fromkeys(LIMITS))
    with running_front(tmp_path, byte_model(), api_keys_file=tmp_path / "keys.yaml") as front:
        assert "/" in OPEN_PATHS
        assert get(front, "/").status_code == 200
        for path in ("/docs", "/docs/assets/swagger-ui.css", "/openapi.json"):
            assert get(front, path).status_code == 401
            assert get(front, path, {"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("path", ["/docs/assets/no-such-file.js", "/docs/assets/../core.py", "/docs/no"])
def test_nothing_but_the_pages_files_is_served_beside_them(front: Running, path: str) -> None:
    answer = get(front, path)
    assert answer.status_code == 404
    assert "error" in answer.json()
