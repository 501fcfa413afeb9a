"""What a vLLM server is asked for, and what it is not."""

import asyncio
from typing import cast

import httpx
import msgspec
import pytest

from mooncake.errors import RequestError
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.requests import Request, SamplingParams, SpanContext
from workers.errors import AnswerLostError, EngineLostError
from workers.vllm.kv_events import KVEventFollower
from workers.vllm.server import Output, VllmServer, check_served, completion_body, trace_headers

ROOT = root_key("f" * 32, "secret")
TOKEN = 'data: {"choices": [{"token_ids": [7]}]}'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}}'
ERROR = 'data: {"error": {"message": "EngineCore has met an issue", "code": 500}}'
DONE = "data: [DONE]"


def request(num_output_tokens: int = 0, **sampling: object) -> Request:
    tokens = list(range(70))
    return Request(
        "r",
        tokens,
        block_keys(tokens, 32, ROOT),
        SamplingParams(**{"max_tokens": 20, **sampling}),  # type: ignore[arg-type]
        "ipc://front",
        root_key=ROOT,
        num_output_tokens=num_output_tokens,
    )


def test_an_answer_goes_on_behind_what_has_been_drawn() -> None:
    """The tokens before count for `min_tokens`; the keys are the request's own."""
    one = request(num_output_tokens=5, min_tokens=9, temperature=0.0, stop_token_ids=(2,), seed=7)
    body = completion_body(one, [*one.token_ids, 3], 14)
    assert body["prompt"] == [*range(70), 3]
    assert (body["max_tokens"], body["min_tokens"]) == (14, 3)
    assert body["stop_token_ids"] == [2]
    assert body["ignore_eos"] is True
    assert body["kv_transfer_params"] == {"root_key": ROOT.hex()}
    assert body["cache_salt"] == ROOT.hex()


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", 0.5, "frequency_penalty"),
        ("repetition_penalty", 1.5, "repetition_penalty"),
        ("bad_words", ((1, 2),), "bad_words"),
        ("grammar", "root ::= 'a'", "grammar"),
        ("num_logprobs", 0, "logprobs"),
    ],
)
def test_what_vllm_cannot_continue_is_named(name: str, value: object, param: str) -> None:
    named = "response_format, or a tool call that needs a grammar," if param == "grammar" else param
    with pytest.raises(RequestError, match=f"^{named} is not served") as caught:
        check_served(request(**{name: value}).sampling)
    assert caught.value.param == param


def test_the_span_of_a_request_goes_with_it() -> None:
    span = SpanContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a=b")
    traced = msgspec.structs.replace(request(), span=span)
    assert trace_headers(traced) == {"traceparent": span.traceparent, "tracestate": "a=b"}
    assert trace_headers(request()) == {}


def test_everything_else_is_served() -> None:
    sampling = request(temperature=0.7, top_p=0.9, top_k=5, seed=3, min_p=0.1, logit_bias={1: 2.0}).sampling
    check_served(sampling)
    assert msgspec.json.encode(completion_body(request(), [1, 2], 1))


def server(lines: list[str], *, status: int = 200, is_healthy: bool = True) -> VllmServer:
    """A server that answers each completion with these lines; without any the connection breaks."""

    async def answer(asked: httpx.Request) -> httpx.Response:
        if asked.url.path == "/health":
            return httpx.Response(200 if is_healthy else 503)
        if not lines:
            raise httpx.RemoteProtocolError("the peer has closed the connection")
        return httpx.Response(status, text="\n\n".join([*lines, ""]))

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://vllm")
    child = cast(asyncio.subprocess.Process, None)
    return VllmServer(http, child, cast(KVEventFollower, None), None)


async def outputs_of(one: VllmServer) -> list[Output]:
    return [output async for output in one.complete(request(), [1, 2], 2)]


async def test_an_answer_brings_its_tokens_and_then_what_was_cached() -> None:
    assert await outputs_of(server([TOKEN, TOKEN, USAGE, DONE])) == [Output([7]), Output([7]), Output([], 64)]


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        ([TOKEN, ERROR, DONE], 200, "vLLM has given up an answer: EngineCore has met an issue"),
        ([TOKEN, USAGE], 200, "vLLM's answer breaks off"),
        ([TOKEN, "data: {"], 200, "vLLM does not answer: DecodeError"),
        ([], 200, "vLLM does not answer: RemoteProtocolError"),
        (["EngineCore has met an issue"], 500, "vLLM answers 500: EngineCore has met an issue"),
    ],
)
@pytest.mark.parametrize("is_healthy", [True, False])
async def test_an_answer_that_is_not_complete_is_lost_alone_or_with_its_engine(
    lines: list[str], status: int, reason: str, is_healthy: bool
) -> None:
    lost = AnswerLostError if is_healthy else EngineLostError
    with pytest.raises(lost, match=reason):
        await outputs_of(server(lines, status=status, is_healthy=is_healthy))
