"""What wrk is told to do, with the real program and a server that does what a test tells it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from benchmarks.front.wrk import Wrk, WrkError
from tests.benchmarks.fake_server import FakeServer, answer, chunk, event, fake_server
from tests.debian import fetched

NUM_TOKENS = 3
NUM_EVENTS = NUM_TOKENS + 1  # usage
BODIES = [json.dumps({"prompt": str(number), "max_tokens": NUM_TOKENS}).encode() for number in range(20)]


@pytest.fixture(scope="module")
def wrk() -> Wrk:
    fetched("wrk", "usr/bin/wrk")
    return Wrk()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def test_every_body_is_answered_once(wrk: Wrk, server: FakeServer) -> None:
    answers = wrk.post(server.url, BODIES, NUM_EVENTS, num_connections=4, spread_s=0.05, max_pause_s=0.02)
    assert sorted(int(body["prompt"]) for body in server.bodies) == list(range(len(BODIES)))
    assert len(answers.times_s) >= len(BODIES)
    assert 0 < answers.times_s[0] <= answers.times_s[-1]
    assert answers.mean_bytes > len(event("[DONE]")) + NUM_TOKENS * len(chunk("a"))


async def refusal(_: dict[str, Any]) -> Response:
    return JSONResponse({"error": "no room"}, status_code=429)


async def without_its_end(_: dict[str, Any]) -> Response:
    return StreamingResponse(iter([chunk("a")] * NUM_EVENTS), media_type="text/event-stream")


async def with_too_few_events(body: dict[str, Any]) -> Response:
    return await answer({**body, "max_tokens": NUM_TOKENS - 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(refusal, "429, 0 events"), (without_its_end, "4 events"), (with_too_few_events, "200, 4 events")],
)
def test_one_answer_that_is_not_whole_is_an_error(
    wrk: Wrk, server: FakeServer, wrong: Any, said: str
) -> None:
    async def all_but_one_are_right(body: dict[str, Any]) -> Response:
        return await (wrong if body["prompt"] == "7" else answer)(body)

    server.behaviour = all_but_one_are_right
    with pytest.raises(WrkError, match=said):
        wrk.post(server.url, BODIES, NUM_EVENTS, num_connections=4, spread_s=0.05)
