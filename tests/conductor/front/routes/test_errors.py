"""Errors of the front: the bodies and the types that clients see."""

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from conductor.front.errors import error_body
from mooncake.errors import RequestError
from mooncake.messages.fronts import ClusterState
from mooncake.messages.requests import Request
from mooncake.messages.workers import STAGES, Role
from tests.conductor.front.fakes import DEADLINE_S, MODEL_NAME, FakeCluster, Running
from tests.conductor.front.routes.asking import HI


def test_rejection_is_a_429_even_for_a_stream(front: Running, client: openai.OpenAI) -> None:
    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "all instances are busy", 2.3)

    front.cluster.behaviour = reject
    num_before = front.metric("mooncake_time_to_rejection_seconds_count")
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="busy") as caught:
            client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
    assert front.metric("mooncake_time_to_rejection_seconds_count") == num_before + 2


def test_failure_before_the_first_token_is_a_500(front: Running, client: openai.OpenAI) -> None:
    async def fail(cluster: FakeCluster, request: Request) -> None:
        await cluster.fail(request, "the instance is gone")

    front.cluster.behaviour = fail
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="instance is gone"):
            client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=stream)


@pytest.mark.parametrize(
    ("told", "param"), [("logit_bias", "logit_bias"), ("grammar", "response_format"), (None, None)]
)
def test_what_an_instance_does_not_serve_is_a_400_that_names_the_field(
    front: Running, client: openai.OpenAI, told: str | None, param: str | None
) -> None:
    async def refuse(cluster: FakeCluster, request: Request) -> None:
        await cluster.fail(request, "it is not served", is_refused=True, param=told)

    front.cluster.behaviour = refuse
    wanted: Any = {"type": "json_object"}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="it is not served") as caught:
            client.chat.completions.create(
                model=MODEL_NAME, messages=HI, stream=stream, response_format=wanted
            )
        error = caught.value
        assert (error.param, error.code) == (param, None if param is None else "unsupported_parameter")


def test_failure_after_the_first_token_is_an_error_event(front: Running, client: openai.OpenAI) -> None:
    received = threading.Event()

    async def fail_later(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        assert await asyncio.to_thread(received.wait, DEADLINE_S)
        await cluster.fail(request, "the instance is gone")

    front.cluster.behaviour = fail_later
    body = {"model": MODEL_NAME, "messages": HI, "stream": True}
    with httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            received.set()
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the instance is gone"

    received.clear()
    chunks = client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=True)
    assert next(chunks).choices[0].delta.role == "assistant"
    received.set()
    with pytest.raises(openai.APIError, match="instance is gone"):
        list(chunks)


def test_error_types_of_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=HI, temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match=MODEL_NAME) as unknown:
        client.chat.completions.create(model="other", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL_NAME, prompt="x" * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
        client.embeddings.create(model=MODEL_NAME, input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/responses") as unserved:
        client.responses.create(model=MODEL_NAME, input="x")
    assert unserved.value.code == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b'{"model": 3}', 400),
        ("POST", "/v1/chat/completions", b"[" * 90_000, 400),
        ("POST", "/v1/completions", b" " * 100_001, 413),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/completions", b"", 400),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/models/none", b"", 404),
    ],
)
def test_every_error_has_the_same_body(
    front: Running, method: str, path: str, body: bytes, status: int
) -> None:
    response = httpx.request(method, front.url + path, content=body, timeout=DEADLINE_S)
    assert response.status_code == status
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert "POST" in error["message"]
        assert response.headers["allow"] == "POST"


def test_body_of_unknown_length_is_limited_too(front: Running) -> None:
    parts = (b" " * 10_000 for _ in range(11))
    response = httpx.post(f"{front.url}/v1/completions", content=parts, timeout=DEADLINE_S)
    assert response.status_code == 413


def test_prompt_larger_than_the_pool_is_refused(front: Running, client: openai.OpenAI) -> None:
    front.publish(ClusterState(1, 2, 1, max_sequence_blocks=2))
    with pytest.raises(openai.BadRequestError, match=r"40 tokens.*at most 32"):
        client.completions.create(model=MODEL_NAME, prompt="x" * 40)
    assert front.cluster.submitted == []


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 1), (1, 0), (0, 0)])
def test_incomplete_cluster_is_not_ready(front: Running, num_prefill: int, num_decode: int) -> None:
    assert httpx.get(f"{front.url}/ready", timeout=DEADLINE_S).status_code == 200
    front.publish(ClusterState(1, num_prefill, num_decode, 10))
    response = httpx.get(f"{front.url}/ready", timeout=DEADLINE_S)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert ("prefill" in message) == (num_prefill == 0)
    assert ("decode" in message) == (num_decode == 0)
    assert httpx.get(f"{front.url}/health", timeout=DEADLINE_S).status_code == 200


@pytest.mark.parametrize("drained", STAGES)
def test_what_is_missing_says_whether_it_drains_or_has_never_been_there(
    front: Running, drained: Role
) -> None:
    [absent] = set(STAGES) - {drained}
    front.publish(ClusterState(1, 0, 0, 10, num_draining={drained: 2, absent: 0}))
    response = httpx.get(f"{front.url}/ready", timeout=DEADLINE_S)
    assert response.status_code == 503
    assert set(response.json()["error"]["message"].removeprefix("not ready: ").split(" and ")) == {
        f"all {drained.value} instances are draining",
        f"no {absent.value} instance has registered",
    }


def test_an_error_keeps_its_traceback_when_its_body_is_made() -> None:
    with pytest.raises(RequestError) as caught:
        raise RequestError("too long", param="prompt")
    assert error_body(caught.value)["error"]["param"] == "prompt"
    assert caught.value.__traceback__ is not None
