"""Whatever a body holds, the answer is a job or the client's mistake: never a bug of ours."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conductor.front.generation.tool_answer import ToolAnswer
from conductor.front.openai.tool_calls import ToolFormat
from conductor.front.requests.tokenization import detokenize, tokenize
from conductor.front.requests.validation import ApiEndpoint, Job, read_job
from mooncake.errors import GrammarError, RequestError
from mooncake.messages.requests import FinishReason
from tests.conductor.front.fakes import EOS, MODEL_NAME, byte_model

MODEL = replace(byte_model(context_len=200), tool_format=ToolFormat.HERMES)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, EOS, EOS + 1, -1]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["auto", "none", "required", "json_object", "function", "f", "{}", "[", "\x00", "type"]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS: Any = st.deferred(
    lambda: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "integer", "wrong", None]),
            "properties": st.dictionaries(st.text(max_size=3), SCHEMAS, max_size=2),
            "items": SCHEMAS,
            "enum": st.lists(SCALARS, max_size=3),
            "$ref": st.sampled_from(["#", "#/$defs/a", "x"]),
            "pattern": st.text(max_size=6),
        },
    )
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"])},
    optional={"parameters": SCHEMAS | ANYTHING, "strict": st.booleans()},
)
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS | ANYTHING})
CALLS = st.fixed_dictionaries(
    {
        "id": st.text(max_size=3),
        "function": st.fixed_dictionaries(
            {"name": st.just("f"), "arguments": st.sampled_from(["{}", "", "[", "3"])}
        ),
    }
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "wizard"]),
        "content": st.text(max_size=8) | ANYTHING,
    },
    optional={
        "tool_calls": st.lists(CALLS | ANYTHING, max_size=2),
        "tool_call_id": st.text(max_size=3) | ANYTHING,
        "name": ANYTHING,
    },
)
FORMATS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])},
    optional={
        "json_schema": st.fixed_dictionaries({"schema": SCHEMAS | ANYTHING}, optional={"name": ANYTHING})
    },
)
NAMES = """n stream stream_options max_tokens temperature top_p top_k min_p stop seed presence_penalty
frequency_penalty repetition_penalty logit_bias bad_words min_tokens stop_token_ids ignore_eos
return_token_ids cache_salt request_id user logprobs metadata echo priority suffix best_of what"""
SHARED = dict.fromkeys(NAMES.split(), ANYTHING) | {"response_format": FORMATS | ANYTHING}
CHATS = st.fixed_dictionaries(
    {"model": st.just(MODEL_NAME), "messages": st.lists(MESSAGES, max_size=3) | ANYTHING},
    optional={
        **SHARED,
        "top_logprobs": ANYTHING,
        "max_completion_tokens": ANYTHING,
        "tools": st.lists(TOOLS | ANYTHING, max_size=3),
        "tool_choice": st.sampled_from(["auto", "none", "required"])
        | st.just({"type": "function", "function": {"name": "f"}})
        | ANYTHING,
        "parallel_tool_calls": ANYTHING,
    },
)
COMPLETIONS = st.fixed_dictionaries(
    {"model": st.just(MODEL_NAME), "prompt": st.text(max_size=8) | st.lists(st.integers(0, 300)) | ANYTHING},
    optional=SHARED,
)
FEW = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def job_of(endpoint: ApiEndpoint, body: Any) -> Job | None:
    try:
        return read_job(endpoint, json.dumps(body).encode(), MODEL, MODEL_NAME, max_choices=8)
    except RequestError as error:
        if error.status >= 500 or len(str(error)) > 1000:
            raise
        return None


def check_chat(body: Any) -> None:
    job = job_of(ApiEndpoint.CHAT, body)
    if job is not None:
        assert job.requests("ipc://x")
        if job.tools is not None:
            answer = ToolAnswer(job.tools)
            answer.see("<tool_call>" + json.dumps(body), FinishReason.STOP)
            answer.gather()
            message = answer.message()
            assert message["role"] == "assistant"


def check_completion(body: Any) -> None:
    job = job_of(ApiEndpoint.COMPLETION, body)
    assert job is None or job.requests("ipc://x")


KINDS = pytest.mark.parametrize(("bodies", "check"), [(CHATS, check_chat), (COMPLETIONS, check_completion)])


@KINDS
def test_bodies(bodies: Any, check: Any) -> None:
    FEW(given(bodies)(check))()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@KINDS
def test_many_bodies(bodies: Any, check: Any) -> None:
    settings(FEW, max_examples=20_000)(given(bodies)(check))()


@pytest.mark.parametrize("answer", [tokenize, detokenize])
@FEW
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": ANYTHING,
            "messages": st.lists(MESSAGES, max_size=2) | ANYTHING,
            "tools": st.lists(TOOLS, max_size=2),
            "tokens": st.lists(st.integers(-1, 300)) | ANYTHING,
            "return_token_strs": ANYTHING,
        },
    )
)
def test_tokenization(answer: Any, body: Any) -> None:
    try:
        answer(json.dumps(body).encode(), MODEL, MODEL_NAME)
    except RequestError as error:
        if error.status >= 500:
            raise


@pytest.mark.parametrize("depth", [10, 150, 300, 600, 900, 990, 5000, 50_000])
def test_depth(depth: int) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    call = f'{{"id": "a", "function": {{"name": "f", "arguments": {json.dumps(deep)}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    user = '"messages": [{"role": "user", "content": "x"}]'
    for model in (MODEL, replace(MODEL, template_takes_tools=False)):
        for fields in (
            f'{user}, "tools": [{tool}]',
            f'{user}, "tools": [{tool}], "tool_choice": "required"',
            f'{user}, "tool_choice": {deep}',
            f'{user}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}',
            f'"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]',
        ):
            body = f'{{"model": "{MODEL_NAME}", {fields}}}'.encode()
            with contextlib.suppress(RequestError):
                read_job(ApiEndpoint.CHAT, body, model, MODEL_NAME, max_choices=8)
            with contextlib.suppress(RequestError):
                tokenize(body, model, MODEL_NAME)


@settings(FEW, max_examples=40)
@given(SCHEMAS)
def test_schemas_are_compiled_or_refused(schema: Any) -> None:
    job = job_of(
        ApiEndpoint.COMPLETION,
        {
            "model": MODEL_NAME,
            "prompt": "x",
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        },
    )
    if job is not None and job.grammar is not None:
        try:
            state = asyncio.run(MODEL.grammars.get(job.grammar.text)).begin()
        except GrammarError:
            return
        assert state.allowed_after([]).any()
