"""The API as clients see it: OpenAI's own client, and plain HTTP where that client hides something."""

import asyncio
import contextlib
import gc
import json
import re
import socket
import struct
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from conductor.front.http.exchange import Exchange
from mooncake.messages.fronts import ClusterState
from mooncake.messages.requests import FinishReason, Request
from mooncake.messages.workers import STAGES, Role
from tests.conductor.front.fakes import DEADLINE_S, EOS, MODEL_NAME, FakeCluster, Running, raw_request

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
NUM_PROMPT_TOKENS = len(b"user: hi\nassistant: ")


@pytest.fixture
def client(front: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def post(front: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(front.url + path, content=content, headers=headers, timeout=DEADLINE_S)


def says(text: str, *, end: bool = True, step: int = 1) -> Any:
    async def behaviour(cluster: FakeCluster, request: Request) -> None:
        await cluster.say(request, text, end=end, step=step)

    return behaviour


def test_chat(front: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, max_tokens=10)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL_NAME
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == NUM_PROMPT_TOKENS
    assert answer.usage.completion_tokens == len("Hello!") + 1  # the end token counts
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert front.cluster.cancelled == []
    assert front.cluster.submitted[0].request_id == f"{answer.id}-0"


def test_streamed_chat(front: Running, client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == 7
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_each_chunk(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL_NAME,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == [0, 1, 2, 3, 4, 5, 6, 7, 7]  # the role comes before the first token


def test_completions_with_several_prompts_and_choices(front: Running, client: openai.OpenAI) -> None:
    async def echo(cluster: FakeCluster, request: Request) -> None:
        index = int(request.request_id.rsplit("-")[-1])
        await asyncio.sleep(0.02 * (4 - index))  # the last first
        await cluster.say(request, f"{bytes(request.token_ids).decode()}{index}")

    front.cluster.behaviour = echo
    answer = client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, seed=3)
    assert [choice.text for choice in answer.choices] == ["a0", "a1", "b2", "b3"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
    assert len({request.sampling.seed for request in front.cluster.submitted}) == 2
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model=MODEL_NAME, prompt=[[97], [98]], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a0", "a1", "b2", "b3"]


def test_stop_string_across_tokens_ends_the_choice_and_the_work(
    front: Running, client: openai.OpenAI
) -> None:
    async def endless(cluster: FakeCluster, request: Request) -> None:
        for position, token_id in enumerate(b"one STtwo STOP" + b"more" * 50):
            await cluster.send_tokens(request, [token_id], position)

    front.cluster.behaviour = endless
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, stop=["STOP", "never"])
    assert answer.choices[0].message.content == "one STtwo "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one STtwo STOP")
    front.cluster.wait_until(lambda: front.cluster.cancelled == [f"{answer.id}-0"])

    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=MODEL_NAME, messages=HI, stop="STOP", stream=True)
    ]
    assert "".join(pieces) == "one STtwo "
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 2)


def test_one_choice_goes_on_when_another_has_met_its_stop_string(
    front: Running, client: openai.OpenAI
) -> None:
    async def talk(cluster: FakeCluster, request: Request) -> None:
        await cluster.say(request, "x.y" if request.request_id.endswith("-0") else "xyz")

    front.cluster.behaviour = talk
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, stop=".", n=2)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [
        ("x", "stop"),
        ("xyz", "length"),
    ]


@pytest.mark.parametrize("text", ["añ🎉b", "日本語"])
def test_characters_are_never_sent_in_parts(front: Running, client: openai.OpenAI, text: str) -> None:
    front.cluster.behaviour = says(text)
    chunks = client.chat.completions.create(model=MODEL_NAME, messages=HI, stream=True)
    pieces = [piece for chunk in chunks if (piece := chunk.choices[0].delta.content)]
    assert pieces == list(text)


def test_character_cut_by_max_tokens_is_left_out(front: Running, client: openai.OpenAI) -> None:
    async def cut(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, "a🎉".encode()[:3], 0, FinishReason.LENGTH)

    front.cluster.behaviour = cut
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI)
    assert answer.choices[0].message.content == "a"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_stop_token_is_counted_but_not_shown(front: Running, client: openai.OpenAI) -> None:
    async def talk(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"ab.", 0, FinishReason.STOP)

    front.cluster.behaviour = talk
    for stop_token_ids, text in ([ord(".")], "ab"), ([], "ab."):
        answer = client.chat.completions.create(
            model=MODEL_NAME, messages=HI, extra_body={"stop_token_ids": stop_token_ids}
        )
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_ignored_eos_is_not_an_end(front: Running) -> None:
    body = {"model": MODEL_NAME, "prompt": "x", "ignore_eos": True, "stop_token_ids": [10]}
    assert post(front, "/v1/completions", body).status_code == 200
    assert front.cluster.submitted[0].sampling.stop_token_ids == (10,)


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


def test_raw_stream_ends_with_done(front: Running) -> None:
    response = post(front, "/v1/completions", {"model": MODEL_NAME, "prompt": "x", "stream": True})
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    bodies = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(body["choices"][0]["text"] for body in bodies) == "Hello!"
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert all("usage" not in body for body in bodies)


def test_re_run_shows_every_token_once(front: Running, client: openai.OpenAI) -> None:
    async def twice(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"He", 0, attempt=1)
        await cluster.send_tokens(request, b"Hell", 0, attempt=2)
        await cluster.send_tokens(request, b"XX", 2, attempt=1)
        await cluster.send_tokens(request, [*b"o", EOS], 4, FinishReason.STOP, attempt=2)

    front.cluster.behaviour = twice
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI)
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).owned_by == "mooncake-serve"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"])
def test_a_wrong_base_url_is_told_the_right_one(front: Running, path: str) -> None:
    response = httpx.post(front.url + path, json={}, timeout=DEADLINE_S)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message.endswith("here; did you mean /v1/chat/completions? GET /openapi.json lists what there is")


def test_head_is_get_without_a_body(front: Running) -> None:
    assert httpx.head(f"{front.url}/nothing").status_code == 404
    wrong = httpx.head(f"{front.url}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert httpx.post(f"{front.url}/health", timeout=DEADLINE_S).headers["allow"] == "GET, HEAD"
    with httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client:
        for path in ("/health", "/v1/models", "/metrics"):
            head, get = client.head(path), client.get(path)  # by one connection: nothing is left in between
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]


def test_the_trace_of_a_request_names_it(front: Running) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    def answered(**headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(f"{front.url}/health", headers=named, timeout=DEADLINE_S).headers["x-request-id"]

    assert answered(traceparent=f"00-{trace}-00f067aa0ba902b7-01") == trace
    assert answered(traceparent=f"00-{trace}-00f067aa0ba902b7-01", x_request_id="mine") == "mine"
    for wrong in (f"00-{trace}", f"ff-{trace}-00f067aa0ba902b7-01", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        assert answered(traceparent=wrong) not in (trace, "0" * 32)


def test_request_id_goes_in_and_out(front: Running) -> None:
    body = {"model": MODEL_NAME, "prompt": "x"}
    assert post(front, "/v1/completions", body, **{"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    named = post(front, "/v1/completions", {**body, "request_id": "other"}, **{"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "other"
    assert len(post(front, "/v1/completions", body, **{"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_long_prompt_is_tokenized_in_another_process(front: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    tokenizer = type(front.model.tokenizer)
    original = tokenizer.encode

    def encode(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return original(self, text)

    monkeypatch.setattr(tokenizer, "encode", encode)
    for prompt, length in (("here", 10), ("there", 10_000), ("there too", 1_000_000)):
        body = {"model": MODEL_NAME, "prompt": prompt, "user": "u" * length}
        with httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client:
            response = client.post("/v1/completions", json=body)
        assert response.status_code == (200 if length < 100_000 else 413)
    assert encoded == ["here"]
    assert [bytes(request.token_ids) for request in front.cluster.submitted] == [b"here", b"there"]


def test_an_answer_with_several_choices_ends_when_the_conductor_gave_the_front_up(front: Running) -> None:
    async def stall(cluster: FakeCluster, request: Request) -> None:
        pass

    cluster = front.cluster
    cluster.behaviour = stall
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "n": 2}).encode()
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        cluster.wait_until(lambda: len(cluster.submitted) == 2)
        unknown = ClusterState(1, 1, 1, 1000, known=False)
        asyncio.run_coroutine_threadsafe(cluster.to_front(unknown), cluster.loop).result(DEADLINE_S)
        assert connection.recv(100).startswith(b"HTTP/1.1 500")
    cluster.reset()
    assert post(front, "/v1/chat/completions", {"model": MODEL_NAME, "messages": HI}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens_before", [0, 1])
def test_hang_up_cancels_the_work(front: Running, stream: bool, num_tokens_before: int) -> None:
    async def stall(cluster: FakeCluster, request: Request) -> None:
        if num_tokens_before:
            await cluster.send_tokens(request, b"a")

    aborted = front.metric("mooncake_requests_total", outcome="aborted")
    front.cluster.behaviour = stall
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "stream": stream, "n": 2}).encode()
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        front.cluster.wait_until(lambda: len(front.cluster.submitted) == 2)
        if stream and num_tokens_before:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert front.cluster.cancelled == []
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 2)
    assert set(front.cluster.cancelled) == {request.request_id for request in front.cluster.submitted}
    assert front.metric("mooncake_requests_total", outcome="aborted") == aborted + 1
    assert front.metric("mooncake_requests_running") == 0


def test_a_hang_up_behind_a_second_request_cancels_the_first(front: Running) -> None:
    has_left = asyncio.Event()

    async def in_two_parts(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await has_left.wait()
        await cluster.send_tokens(request, b"b", 1)

    aborted = front.metric("mooncake_requests_total", outcome="aborted")
    front.cluster.behaviour = in_two_parts
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "stream": True}).encode()
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        httpx.get(f"{front.url}/health", timeout=DEADLINE_S)  # answered later, so that has been read
        # So that the server's next write fails: with a request waiting it reads no more, and sees no end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    front.cluster.loop.call_soon_threadsafe(has_left.set)
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 1)
    assert front.metric("mooncake_requests_total", outcome="aborted") == aborted + 1


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_requests_behind_each_other_are_answered_in_turn(front: Running, piece_bytes: int) -> None:
    texts = [f"{number} \n\n" * number for number in range(40)]
    requests = []
    for number, text in enumerate(texts):
        body = json.dumps({"prompt": text}, indent=number).replace("\n", "\r\n\r\n").encode()
        length = b"content-length: %d\r\n\r\n%s" % (len(body), body)
        chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        requests += [b"POST /tokenize HTTP/1.1\r\nhost: x\r\n", chunks if number % 2 else length]
        requests += [b"GET /health HTTP/1.1\r\n\r\n"] * (number % 4)
    said = b"".join(requests) + b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(said), piece_bytes):
            connection.sendall(said[start : start + piece_bytes])
        with connection.makefile("rb") as heard:
            answers = heard.read()
    expected = []
    for number, text in enumerate(texts):
        expected += [b'"count":%d,' % len(text.encode())] + [b'{"status":"ok"}'] * (number % 4)
    assert re.findall(rb'"count":\d+,|{"status":"ok"}|"version"', answers) == [*expected, b'"version"']
    assert answers.count(b"HTTP/1.1 200 ") == len(expected) + 1


def test_what_comes_behind_the_last_request_is_not_read(
    front: Running, caplog: pytest.LogCaptureFixture
) -> None:
    last = b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(last * 3)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1000):
                answer += piece
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01 is no HTTP\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
    ids=["no HTTP", "another protocol"],
)
def test_clients_that_speak_something_else_do_not_fill_the_log(
    front: Running, caplog: pytest.LogCaptureFixture, said: bytes, status: int
) -> None:
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(said)
        assert connection.recv(100).startswith(b"HTTP/1.1 %d" % status)
    assert not caplog.records


def test_metrics(front: Running, client: openai.OpenAI) -> None:
    names = [
        "mooncake_prompt_tokens_total",
        "mooncake_cached_prompt_tokens_total",
        "mooncake_generation_tokens_total",
        "mooncake_time_to_first_token_seconds_count",
        "mooncake_token_gap_seconds_count",
    ]
    before = [front.metric(name) for name in names]
    client.chat.completions.create(model=MODEL_NAME, messages=HI)
    after = [front.metric(name) for name in names]
    gains = [new - old for old, new in zip(before, after, strict=True)]
    assert gains == [NUM_PROMPT_TOKENS, 16, 7, 1, 6]
    text = httpx.get(f"{front.url}/metrics", timeout=DEADLINE_S).text
    for name in ("mooncake_requests_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total"):
        assert f"\n{name}{{" in text
    assert front.metric("mooncake_requests_running") == 0
    assert front.metric("vllm:num_requests_waiting", model_name=MODEL_NAME) == 0


def test_openapi_describes_the_bodies(front: Running) -> None:
    paths = httpx.get(f"{front.url}/openapi.json", timeout=DEADLINE_S).json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "cache_salt"} <= set(body["properties"])


def num_exchanges() -> int:
    """Requests of which the server remembers something."""
    return sum(type(kept) is Exchange for kept in gc.get_objects())


def test_what_a_request_needed_is_freed_without_a_search_for_garbage(front: Running) -> None:
    """All streams would wait for that."""
    gc.collect()
    threshold, *others = gc.get_threshold()
    gc.set_threshold(0, *others)  # never; who reads a body disables and enables it
    try:
        num_before = num_exchanges()
        with httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client:
            body = {"model": MODEL_NAME, "prompt": "hi", "stream": True}
            for _ in range(5):
                assert client.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
            assert num_exchanges() <= num_before + 1, "a connection remembers the latest one"
            for _ in range(5):  # each over a connection of its own
                httpx.post(f"{front.url}/v1/completions", json=body, timeout=DEADLINE_S)
            deadline_s = time.monotonic() + DEADLINE_S
            while num_exchanges() > num_before + 1:
                assert time.monotonic() < deadline_s, "connections that are closed remember the latest one"
                client.get("/health")
    finally:
        gc.set_threshold(threshold, *others)
