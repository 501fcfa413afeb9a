"""LangChain and LiteLLM against a real cluster with the default model, as their users write."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import openai
import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.deadline import DEADLINE_S

pytestmark = pytest.mark.cluster
MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]
STORY: Any = [{"role": "user", "content": "Tell me a very long story."}]
CITY: dict[str, Any] = {
    "title": "note_city",
    "description": "Notes a city.",
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "continent": {"type": "string", "enum": ["Europe", "Asia", "Africa"]},
    },
    "required": ["city", "continent"],
    "additionalProperties": False,
}


def is_city(value: dict[str, Any]) -> bool:
    return set(value) == set(CITY["required"]) and value["continent"] in ("Europe", "Asia", "Africa")


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported here: it takes seconds, which other tests need not wait for."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import asks GitHub
    import litellm

    return litellm


@pytest.fixture
def of_litellm(default_server: Server) -> dict[str, Any]:
    """The arguments of every call."""
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{default_server.url}/v1",
        "api_key": "any",
        "max_retries": 0,
        "timeout": DEADLINE_S,
        "temperature": 0,
    }


@pytest.fixture
def langchain(default_server: Server) -> Callable[..., Any]:
    """Makes a chat model; imported here for the same reason."""
    from langchain_openai import ChatOpenAI

    def chat(**fields: Any) -> Any:
        fields = {"model": MODEL, "temperature": 0, "max_tokens": 100, **fields}
        return ChatOpenAI(
            base_url=f"{default_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S, **fields
        )

    return chat


def test_langchain(langchain: Callable[..., Any]) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain()
    answer = chat.invoke("Name the capital of France.")
    assert "Paris" in answer.content
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    pieces = list(langchain(stream_usage=True).stream("Name the capital of France."))
    assert "".join(piece.content for piece in pieces) == answer.content
    counts = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert [count["output_tokens"] for count in counts] == [answer.usage_metadata["output_tokens"]]
    called = chat.bind_tools([CITY], tool_choice="any", parallel_tool_calls=False).invoke(
        "Name the capital of France."
    )
    [call] = called.tool_calls
    assert call["name"] == "note_city"
    assert is_city(call["args"])
    turn = [("user", "Name the capital of France."), called, ToolMessage("noted", tool_call_id=call["id"])]
    assert langchain(max_tokens=5).bind_tools([CITY], tool_choice="none").invoke(turn).content
    assert is_city(chat.with_structured_output(CITY, method="json_schema").invoke("Describe Paris."))
    logprobs = langchain(max_tokens=5, logprobs=True, top_logprobs=2).invoke("Say something.")
    content = logprobs.response_metadata["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5
    teller = langchain(n=3, temperature=1, seed=7, max_tokens=20)
    [several] = teller.generate([[HumanMessage("Tell me a story.")]]).generations
    assert len({choice.text for choice in several}) == 3


def test_langchains_errors(langchain: Callable[..., Any]) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(openai.NotFoundError, match=MODEL):
        langchain(model="no-such-model").invoke("x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        langchain(temperature=3).invoke("x")
    with pytest.raises(ContextOverflowError, match="8192"):
        langchain().invoke("x " * 9000)


def test_litellm(litellm: ModuleType, of_litellm: dict[str, Any]) -> None:
    answer = litellm.completion(**of_litellm, messages=QUESTION, max_tokens=32)
    text = answer.choices[0].message.content
    assert "Paris" in text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = litellm.completion(
        **of_litellm, messages=QUESTION, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    tool = {"type": "function", "function": {"name": "note_city", "parameters": CITY}}
    tools = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    [call] = litellm.completion(**of_litellm, messages=QUESTION, **tools).choices[0].message.tool_calls
    assert is_city(json.loads(call.function.arguments))
    chunks = list(litellm.completion(**of_litellm, messages=QUESTION, **tools, stream=True))
    [streamed] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    described = litellm.completion(**of_litellm, messages=QUESTION, response_format=schema, max_tokens=100)
    assert is_city(json.loads(described.choices[0].message.content))
    arguments = {**of_litellm, "temperature": 1, "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2}
    several = litellm.completion(**arguments, messages=STORY, max_tokens=20).choices
    assert len({choice.message.content for choice in several}) == 3
    assert {len(entry.top_logprobs) for entry in several[2].logprobs.content} == {2}
    arguments = {**of_litellm, "model": f"text-completion-openai/{MODEL}"}
    assert (
        litellm.text_completion(**arguments, prompt="The capital of France is", max_tokens=5).choices[0].text
    )


def test_litellms_errors(litellm: ModuleType, of_litellm: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match=MODEL):
        litellm.completion(**{**of_litellm, "model": "openai/no-such-model"}, messages=QUESTION)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**of_litellm, "temperature": 3}, messages=QUESTION)
    with pytest.raises(litellm.ContextWindowExceededError, match="8192"):
        litellm.completion(**of_litellm, messages=[{"role": "user", "content": "x " * 9000}])


async def test_a_cancelled_call_of_each_client_ends_its_work(
    litellm: ModuleType, of_litellm: dict[str, Any], langchain: Callable[..., Any], default_server: Server
) -> None:
    def num_requests(pattern: str) -> float:
        text = HTTP.get(f"{default_server.url}/metrics", timeout=DEADLINE_S).text
        return sum(float(value) for value in re.findall(rf"(?m)^{pattern} ([0-9.e+]+)$", text))

    async def cancelled(call: Coroutine[Any, Any, Any]) -> None:
        running, aborted = "mooncake_requests_running", r'mooncake_requests_total\{outcome="aborted"\}'
        num_aborted = num_requests(aborted)
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        while num_requests(running) == 0:
            assert not task.done(), task.result()
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(eventually, lambda: num_requests(aborted) == num_aborted + 1, "aborted")
        await asyncio.to_thread(eventually, lambda: num_requests(running) == 0, "nothing runs")

    client = openai.AsyncOpenAI(
        base_url=f"{default_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
    )
    for call in (
        client.chat.completions.create(model=MODEL, messages=STORY, extra_body={"ignore_eos": True}),
        langchain(max_tokens=None, extra_body={"ignore_eos": True}).ainvoke("Tell me a very long story."),
        litellm.acompletion(**of_litellm, messages=STORY, extra_body={"ignore_eos": True}),
    ):
        await asyncio.wait_for(cancelled(call), DEADLINE_S)
