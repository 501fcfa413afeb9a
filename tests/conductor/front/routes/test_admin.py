"""Operators' routes: what they tell the Conductor, and what becomes of its answer."""

import httpx
import pytest

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
