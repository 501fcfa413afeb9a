"""Tools as clients use them: OpenAI's own client, streamed and not, a model that says what it is told."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from conductor.front.generation.tool_answer import ToolAnswer
from conductor.front.openai.tool_calls import ToolFormat, format_of_template, takes_tools
from conductor.front.openai.tools import FunctionFields, ToolUse
from conductor.front.requests.validation import ApiEndpoint, Job, read_job
from mooncake.errors import RequestError
from mooncake.messages.requests import FinishReason, Request
from tests.conductor.front.fakes import (
    DEADLINE_S,
    MODEL_NAME,
    FakeCluster,
    Running,
    byte_model,
    running_front,
)
from tests.conductor.front.routes.test_app import says

MODEL = replace(byte_model(), tool_format=ToolFormat.HERMES)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "what it does",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
HI: Any = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def prompt_of(messages: Any, **fields: Any) -> str:
    model = fields.pop("model_", MODEL)
    body = json.dumps({"model": MODEL_NAME, "messages": messages, **fields}).encode()
    job: Job = read_job(ApiEndpoint.CHAT, body, model, MODEL_NAME, max_choices=8)
    return bytes(job.prompts[0].token_ids).decode()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_front(tmp_path_factory.mktemp("front"), MODEL) as front:
        yield front


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    running.cluster.reset()
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def test_calls_of_an_answer(running: Running, client: openai.OpenAI) -> None:
    running.cluster.behaviour = says(f"{CALL}\n{CALL}")
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", ARGUMENTS)
    ] * 2
    assert calls[0].id != calls[1].id
    single = client.chat.completions.create(
        model=MODEL_NAME, messages=HI, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(single.choices[0].message.tool_calls or ()) == 1


def test_streamed_calls_come_as_they_are_written(running: Running, client: openai.OpenAI) -> None:
    running.cluster.behaviour = says(f"So:\n{CALL}")
    with client.chat.completions.stream(model=MODEL_NAME, messages=HI, tools=TOOLS, n=2) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final: Any = stream.get_final_completion()
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "So:"
        assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == 1]
    calls: Any = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (calls[0].index, calls[0].type, calls[0].function.name) == (0, "function", "get_weather")
    assert calls[0].id.startswith("call_")
    assert all((call.index, call.id, call.function.name) == (0, None, None) for call in calls[1:])
    assert len(calls) > 5


def test_an_answer_that_stops_within_a_call_says_so(running: Running, client: openai.OpenAI) -> None:
    running.cluster.behaviour = says(CALL)
    for stop, reason in (("Kö", "stop"), ("</tool", "tool_calls")):
        answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=TOOLS, stop=stop)
        assert answer.choices[0].finish_reason == reason


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_a_call_that_is_cut_shows_no_marks(tool_format: ToolFormat, must_call: bool) -> None:
    """Wherever it is cut: a part of the call, or nothing."""
    written = {
        ToolFormat.HERMES: CALL,
        ToolFormat.LLAMA3_JSON: f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        ToolFormat.MISTRAL: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    }[tool_format]
    functions = (FunctionFields(name="get_weather"),)
    for length in range(1 if must_call else 2, len(written)):
        answer = ToolAnswer(ToolUse(tool_format, functions, must_call, False, None))
        answer.see(written[:length], FinishReason.LENGTH)
        answer.gather()
        message = answer.message()
        assert not message["content"], length
        assert message["role"] == "assistant"
        for call in message.get("tool_calls", ()):
            assert ARGUMENTS.startswith(call["function"]["arguments"])


def test_a_required_call_that_is_cut(running: Running, client: openai.OpenAI) -> None:
    for length, num_calls in ((15, 0), (len(CALL) - 20, 1)):
        running.cluster.behaviour = says(CALL[:length], end=False)
        asked: Any = {"model": MODEL_NAME, "messages": HI, "tools": TOOLS, "tool_choice": "required"}
        choice = client.chat.completions.create(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content or "") == ("length", "")
        assert len(choice.message.tool_calls or ()) == num_calls
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        assert not any(delta.content for delta in deltas)


def test_a_text_that_is_cut_is_whole(running: Running, client: openai.OpenAI) -> None:
    for text in ("1 < 2", "1 <", "[", "<tools>"):
        running.cluster.behaviour = says(text, end=False)
        answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_with_the_last_call_that_is_wanted(
    running: Running, client: openai.OpenAI, stream: bool
) -> None:
    may_go_on = threading.Event()

    async def call_again_and_again(cluster: FakeCluster, request: Request) -> None:
        text = CALL.encode()
        for number in range(1000):
            for position, token in enumerate(text):
                await cluster.send_tokens(request, [token], number * len(text) + position)
            if request.request_id in cluster.cancelled:
                may_go_on.set()
                return
            await asyncio.sleep(0)

    running.cluster.behaviour = call_again_and_again
    asked: Any = {"model": MODEL_NAME, "messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.arguments == ARGUMENTS
    assert may_go_on.wait(DEADLINE_S), "the request was not cancelled"


def test_text_is_an_answer_too_and_none_shows_no_tools(running: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=TOOLS, tool_choice="auto")
    assert answer.choices[0].message.content == "Hello!"
    assert (answer.choices[0].finish_reason, answer.choices[0].message.tool_calls) == ("stop", None)
    running.cluster.behaviour = says(CALL)
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == CALL
    shown = [bytes(request.token_ids) for request in running.cluster.submitted]
    assert [b"get_time" in prompt for prompt in shown] == [True, False]


def test_logprobs_of_text_that_is_held_back_are_shown(running: Running, client: openai.OpenAI) -> None:
    running.cluster.behaviour = says(CALL)
    chunks = client.chat.completions.create(
        model=MODEL_NAME, messages=HI, tools=TOOLS, logprobs=True, stream=True
    )
    entries = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == CALL + "<end>"


def test_calls_and_their_answers_reach_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    tokenizer = type(MODEL.tokenizer)
    monkeypatch.setattr(
        tokenizer, "render_chat", lambda _, messages, **more: rendered.append((messages, more)) or [1]
    )
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}
    turn = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    prompt_of(turn, tools=TOOLS)
    [(messages, more)] = rendered
    function = {"name": "get_time", "arguments": {"a": 1}}
    assert messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "get_time"},
    ]
    assert more["tools"] == TOOLS
    call["function"] = {"name": "get_time", "arguments": "[1"}
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        prompt_of(turn, tools=TOOLS)


def test_tools_are_described_to_a_template_without_a_place_for_them() -> None:
    model = replace(MODEL, template_takes_tools=False)
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turn = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    prompt = prompt_of(turn, tools=TOOLS, model_=model)
    assert prompt.startswith("system: Be brief.\n\nYou may call")
    assert json.dumps(TOOLS[1]) in prompt
    assert 'assistant: <tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n' in prompt
    assert "user: <tool_response>\nnoon\n</tool_response>\n" in prompt
    assert prompt_of(HI, tools=TOOLS, model_=model).startswith("system: You may call")
    unknown = replace(model, tool_format=None)
    for messages, fields, param in ((HI, {"tools": TOOLS}, "tools"), (turn, {}, "messages[2]")):
        with pytest.raises(RequestError, match="--http-tool-parser") as caught:
            prompt_of(messages, **fields, model_=unknown)
        assert caught.value.param == param
    assert prompt_of(HI, tools=TOOLS, tool_choice="none", model_=unknown) == "user: hi\nassistant: "


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tools>{% endif %} <tool_call>", ToolFormat.HERMES),
        ("{{ tools }} [AVAILABLE_TOOLS] [TOOL_CALLS] [", ToolFormat.MISTRAL),
        ('{{ tools }} {"name": function name, "parameters": dict} ipython', ToolFormat.LLAMA3_JSON),
        ("{{ tools }} <tool_call><function=name>", None),
        ("{{ tools }} another way", None),
        ("<tool_call> without them", None),
    ],
)
def test_format_of_a_template(template: str, expected: ToolFormat | None) -> None:
    assert format_of_template(template) is expected
    assert takes_tools(template) == ("{" in template)
