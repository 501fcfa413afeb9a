"""`response_format` and tools that must be called become grammars; what cannot is the client's mistake."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from conductor.front.openai.tool_calls import Arguments, CallStart, ToolCallParser, ToolFormat
from conductor.front.requests.validation import ApiEndpoint, Job, read_job
from mooncake.errors import RequestError
from tests.conductor.front.fakes import DEADLINE_S, EOS, MODEL_NAME, Running, byte_model

MODEL = byte_model()
CITY = {
    "$defs": {"city": {"enum": ["Bonn", 'Kö"ln']}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("weather", '{"city": "Bonn"}'), ("now", '{"zone": [1, 2]}')]
WRITTEN = {
    ToolFormat.HERMES: (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {"zone": [1, 2]}}\n</tool_call>',
    ),
    ToolFormat.LLAMA3_JSON: (
        '{"name": "weather", "parameters": {"city": "Bonn"}}',
        '; {"name": "now", "parameters": {"zone": [1, 2]}}',
    ),
    ToolFormat.MISTRAL: (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}',
        ', {"name": "now", "arguments": {"zone": [1, 2]}}',
    ),
}


def chat(tool_format: ToolFormat = ToolFormat.HERMES, **fields: Any) -> Job:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], **fields}
    model = replace(MODEL, tool_format=tool_format)
    return read_job(ApiEndpoint.CHAT, json.dumps(body).encode(), model, MODEL_NAME, max_choices=8)


def fits(job: Job, text: str) -> bool:
    """Whether `text`, and then the end, is an answer to `job`. Its tokens are bytes."""
    state = asyncio.run(MODEL.grammars.get(job.sampling[0].grammar)).begin()
    tokens = [*text.encode(), EOS]
    for position, token in enumerate(tokens):
        allowed = state.allowed_after(tokens[:position])
        if not allowed[token // 8] >> (token % 8) & 1:
            return False
    return True


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_an_answer_in_json() -> None:
    anything = chat(response_format={"type": "json_object"})
    assert fits(anything, '{"a": [1,\n  null]}')
    assert not fits(anything, "[1]")
    assert not fits(anything, '{"a": 1} so')
    city = chat(response_format=json_schema(CITY))
    assert fits(city, '{"city": "K\\u00f6\\"ln"}') or fits(city, '{"city": "Kö\\"ln"}')
    assert not fits(city, '{"city": "Rome"}')
    assert not fits(city, "{}")
    assert chat(response_format={"type": "text"}).sampling[0].grammar == ""
    assert chat().grammar is None


def test_clients_cannot_choose_how_schemas_are_read() -> None:
    lenient = {**CITY, "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    assert not fits(chat(response_format=json_schema(lenient)), '{xx"city": "Bonn"}')


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_required_calls_are_those_that_are_found_in_the_text(tool_format: ToolFormat) -> None:
    first, second = WRITTEN[tool_format]
    end = "]" if tool_format is ToolFormat.MISTRAL else ""
    required = chat(tool_format, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    assert fits(required, first + second + end)
    assert fits(required, first + end)
    assert not fits(required, "Sure. " + first + end)
    assert not fits(required, (first + end).replace("Bonn", "Rome"))
    # A model that may not say what it would say now goes on calling if it can.
    for parallel in (None, False):
        single = chat(tool_format, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        assert fits(single, first + end)
        assert not fits(single, first + second + end)
    named = chat(tool_format, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not fits(named, first + end)
    parser = ToolCallParser(tool_format, ["weather", "now"])
    events = parser.push(first + second + end) + parser.finish()
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [event.piece for event in events if isinstance(event, Arguments)]
    assert list(zip(names, arguments, strict=True)) == CALLS
    assert len(events) == 4


def test_a_mark_that_is_a_special_token_is_drawn_as_that_token(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = type(MODEL.tokenizer).encode
    monkeypatch.setattr(
        type(MODEL.tokenizer),
        "encode",
        lambda self, text, **more: [EOS] if text == "[TOOL_CALLS]" else encode(self, text, **more),
    )
    job = chat(ToolFormat.MISTRAL, tools=TOOLS, tool_choice="required")
    assert f"<[{EOS}]>" in job.sampling[0].grammar
    assert "TOOL_CALLS" not in job.sampling[0].grammar


def test_an_answer_in_json_beside_tools_is_one_or_the_other() -> None:
    both = chat(tools=TOOLS, response_format=json_schema(CITY))
    assert fits(both, '{"city": "Bonn"}')
    assert fits(both, "".join(WRITTEN[ToolFormat.HERMES]))
    assert not fits(both, "Hello")
    calls = chat(tools=TOOLS, response_format=json_schema(CITY), tool_choice="required")
    assert not fits(calls, '{"city": "Bonn"}')


def test_large_schemas_are_refused_before_they_are_compiled() -> None:
    with pytest.raises(RequestError, match="32768") as caught:
        chat(response_format=json_schema({"enum": ["x" * 40_000]}))
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")


def nested(depth: int) -> Any:
    return [] if depth == 0 else [nested(depth - 1)]


def test_over_http(front: Running) -> None:
    def post(**fields: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "prompt": "x", **fields}
        return httpx.post(f"{front.url}/v1/completions", json=body, timeout=DEADLINE_S)

    assert post(response_format={"type": "json_object"}).status_code == 200
    assert front.cluster.submitted[0].sampling.grammar.startswith("start: ")
    for schema, reason in (
        ({"type": "array", "uniqueItems": True}, 'keywords that cannot be held to: "uniqueItems"'),
        ({"const": nested(200)}, "the schema cannot be read: it is nested too deeply"),
        ({"const": 10**400}, "the schema cannot be read: number out of range"),
        (
            {"$ref": "#"},
            "a reference ($ref) leads back to itself, with nothing in between to write",
        ),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "with nothing in between to write"),
        ({"type": "strin"}, "response_format: Invalid type: strin"),
        ({"type": "string", "pattern": "(("}, "unclosed group"),
    ):
        refused = post(response_format=json_schema(schema))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "invalid_schema")
        assert error["message"].endswith(reason)
    assert len(front.cluster.submitted) == 1
