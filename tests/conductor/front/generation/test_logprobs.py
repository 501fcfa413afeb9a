"""Logprobs as clients see them: OpenAI's own client, streamed and not. The fake worker's are made up."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from conductor.front.generation.generation import Delta
from conductor.front.generation.logprobs import LEAST_LOGPROB, of_chat, of_completion
from mooncake.messages.requests import FinishReason, Request, TokenLogprobs
from tests.conductor.front.fakes import DEADLINE_S, EOS, MODEL_NAME, ByteTokenizer, FakeCluster, Running

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TOKEN_BYTES = ByteTokenizer().token_bytes


@pytest.fixture
def client(front: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


async def says_cafe(cluster: FakeCluster, request: Request) -> None:
    await cluster.say(request, "café!", end=True, step=2)


def test_chat(front: Running, client: openai.OpenAI) -> None:
    front.cluster.behaviour = says_cafe
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    expected = [*"café!".encode(), EOS]
    assert [entry.logprob for entry in content] == [-token for token in expected]
    assert [entry.token for entry in content] == ["c", "a", "f", "\ufffd", "\ufffd", "!", "<end>"]
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]) == "café!".encode()
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", -97), ("b", -98)]


def test_streamed_chat_has_each_token_once(front: Running, client: openai.OpenAI) -> None:
    front.cluster.behaviour = says_cafe
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(model=MODEL_NAME, messages=HI, logprobs=True, stream=True)
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "café!"
    entries = [
        entry for chunk in chunks if chunk.logprobs is not None for entry in chunk.logprobs.content or []
    ]
    assert [entry.logprob for entry in entries] == [-token for token in [*"café!".encode(), EOS]]
    assert all(entry.top_logprobs == [] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_completion(front: Running, client: openai.OpenAI, stream: bool) -> None:
    front.cluster.behaviour = says_cafe
    if stream:
        chunks = list(client.completions.create(model=MODEL_NAME, prompt="x", logprobs=2, stream=True))
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    else:
        answer = client.completions.create(model=MODEL_NAME, prompt="x", logprobs=2)
        assert answer.choices[0].text == "café!"
        assert answer.choices[0].logprobs is not None
        parts = [answer.choices[0].logprobs]
    expected = [*"café!".encode(), EOS]
    assert [value for part in parts for value in part.token_logprobs or []] == [-token for token in expected]
    assert [token for part in parts for token in part.tokens or []] == [
        *"caf",
        "\ufffd",
        "\ufffd",
        "!",
        "<end>",
    ]
    assert [offset for part in parts for offset in part.text_offset or []] == [0, 1, 2, 3, 3, 4, 5]
    tops = [top for part in parts for top in part.top_logprobs or []]
    assert tops[0] == {"a": -97, "b": -98, "c": -99}  # the drawn one is always there
    assert tops[1] == {"a": -97, "b": -98}


def test_without_logprobs_there_are_none(front: Running, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model=MODEL_NAME, messages=HI).choices[0].logprobs is None
    assert client.completions.create(model=MODEL_NAME, prompt="x").choices[0].logprobs is None
    assert front.cluster.submitted[0].sampling.num_logprobs is None


def test_tokens_of_the_stop_string_are_reported_and_those_behind_are_not(
    front: Running, client: openai.OpenAI
) -> None:
    async def behaviour(cluster: FakeCluster, request: Request) -> None:
        await cluster.say(request, "one STOP more", step=20)

    front.cluster.behaviour = behaviour
    answer = client.completions.create(model=MODEL_NAME, prompt="x", logprobs=0, stop="STOP")
    assert answer.choices[0].text == "one "
    assert answer.choices[0].logprobs is not None
    assert "".join(answer.choices[0].logprobs.tokens or []) == "one STOP"


def test_no_stop_string_is_found_before_min_tokens(front: Running, client: openai.OpenAI) -> None:
    async def behaviour(cluster: FakeCluster, request: Request) -> None:
        await cluster.say(request, "STOP and STOP", step=3)

    front.cluster.behaviour = behaviour
    answer = client.completions.create(
        model=MODEL_NAME, prompt="x", stop="STOP", extra_body={"min_tokens": 4}
    )
    assert answer.choices[0].text == "STOP and "
    assert answer.choices[0].finish_reason == "stop"


def test_minus_infinity_is_a_number_that_json_has() -> None:
    impossible = TokenLogprobs(float("-inf"), [98], [float("-inf")])
    delta = Delta(0, "a", [97], FinishReason.LENGTH, [impossible], [0])
    assert of_chat(delta, TOKEN_BYTES)["content"][0]["logprob"] == LEAST_LOGPROB
    assert of_completion(delta, TOKEN_BYTES)["top_logprobs"] == [{"a": LEAST_LOGPROB, "b": LEAST_LOGPROB}]
