"""What a vLLM server is asked for, and what it is not."""

import msgspec
import pytest

from mooncake.errors import RequestError
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.requests import Request, SamplingParams, SpanContext
from workers.vllm.server import check_served, completion_body, trace_headers

ROOT = root_key("f" * 32, "secret")


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
    ("name", "value", "named"),
    [
        ("presence_penalty", 0.5, "presence_penalty is not served"),
        ("frequency_penalty", 0.5, "frequency_penalty is not served"),
        ("repetition_penalty", 1.5, "repetition_penalty is not served"),
        ("bad_words", ((1, 2),), "bad_words is not served"),
        ("grammar", "root ::= 'a'", "^response_format, or a tool call that needs a grammar, is not served"),
        ("num_logprobs", 0, "^logprobs is not served"),
    ],
)
def test_what_vllm_cannot_continue_is_named(name: str, value: object, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        check_served(request(**{name: value}).sampling)


def test_the_span_of_a_request_goes_with_it() -> None:
    span = SpanContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a=b")
    traced = msgspec.structs.replace(request(), span=span)
    assert trace_headers(traced) == {"traceparent": span.traceparent, "tracestate": "a=b"}
    assert trace_headers(request()) == {}


def test_everything_else_is_served() -> None:
    sampling = request(temperature=0.7, top_p=0.9, top_k=5, seed=3, min_p=0.1, logit_bias={1: 2.0}).sampling
    check_served(sampling)
    assert msgspec.json.encode(completion_body(request(), [1, 2], 1))
