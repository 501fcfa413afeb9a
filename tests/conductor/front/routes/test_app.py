"""The API as clients see it: OpenAI's own client, and plain HTTP where that client hides something."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from conductor.front.generation import receptions
from mooncake.messages.fronts import ClusterState
from mooncake.messages.requests import FinishReason, Request
from tests.conductor.front.fakes import DEADLINE_S, EOS, MODEL_NAME, FakeCluster, Running, raw_request
from tests.conductor.front.routes.asking import HI, NUM_PROMPT_TOKENS, post, says


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
        assert connection.recv(100).startswith(b"HTTP/1.1 503")
    cluster.reset()
    assert post(front, "/v1/chat/completions", {"model": MODEL_NAME, "messages": HI}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_of_an_answer_that_is_rejected_only_the_first_choice_is_submitted(
    front: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receptions, "MAX_UNACCEPTED_BEATS", 10_000)  # no acceptance counts as lost

    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "full", None)

    front.cluster.behaviour, front.cluster.accepts = reject, False
    body = {"model": MODEL_NAME, "messages": HI, "n": 4, "stream": stream}
    assert post(front, "/v1/chat/completions", body).status_code == 429
    front.cluster.behaviour, front.cluster.accepts = says("Hello!"), True
    assert post(front, "/v1/chat/completions", body).status_code == 200
    ids = [request.request_id.rpartition("-") for request in front.cluster.submitted]
    assert [index for _, _, index in ids] == ["0", "0", "1", "2", "3"]


def test_a_client_that_goes_before_its_answer_is_accepted_leaves_nothing(front: Running) -> None:
    async def stall(cluster: FakeCluster, request: Request) -> None:
        pass

    cluster = front.cluster
    cluster.behaviour, cluster.accepts = stall, False
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "n": 4}).encode()
    with raw_request(front.address, "/v1/chat/completions", body):
        cluster.wait_until(lambda: len(cluster.submitted) > 0)
    cluster.wait_until(
        lambda: sorted(cluster.cancelled) == sorted(request.request_id for request in cluster.submitted)
    )


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
