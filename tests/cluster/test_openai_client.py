"""The official OpenAI client against a real cluster with the default model."""

import json

import openai
import pytest

from tests.cluster.harness import Server
from tests.deadline import DEADLINE_S

pytestmark = pytest.mark.cluster
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture
def client(default_server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{default_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
    )


def test_a_sensible_answer_streamed_and_not(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32


def test_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=7,
            max_tokens=20,
            temperature=1,
        )
        return [choice.message.content or "" for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_logprobs_of_a_greedy_answer_are_the_likeliest_and_join_to_it(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12, "logprobs": True}
    answer = client.chat.completions.create(**arguments, top_logprobs=3)  # type: ignore[call-overload]
    entries = answer.choices[0].logprobs.content
    shown = [entry for entry in entries if entry.token != "<|im_end|>"]
    text = b"".join(bytes(entry.bytes) for entry in shown).decode()
    assert text == answer.choices[0].message.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-2)


def test_forbidden_and_preferred_words(client: openai.OpenAI) -> None:
    def answer(**fields: object) -> str:
        choice = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=12,
            extra_body=fields,
        ).choices[0]
        return choice.message.content or ""

    assert "Paris" in answer()
    assert "Paris" not in answer(bad_words=["Paris"])
    assert len(set(answer(presence_penalty=2, frequency_penalty=2, min_tokens=12).split())) > 4


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32, stop=["is Par", "never"]
    )
    assert answer.choices[0].message.content == "The capital of France "
    assert answer.choices[0].finish_reason == "stop"


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
    },
    "required": ["city", "continent"],
    "additionalProperties": False,
}


def test_answers_follow_a_schema_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe the capital of France as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        "temperature": 0.9,
        "max_tokens": 100,
        "seed": 3,
        "n": 2,
    }
    answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    values = [json.loads(choice.message.content) for choice in answer.choices]
    assert all(set(value) == set(CITY["required"]) for value in values)
    assert all(value["continent"] in ("Europe", "Asia", "Africa") for value in values)
    again = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    unusable = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    arguments["response_format"] = {"type": "json_schema", "json_schema": unusable}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**arguments)  # type: ignore[call-overload]


def test_tools_that_must_be_called_are_called_streamed_and_not(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "note_city", "parameters": CITY}}
    arguments = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    choice = answer.choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.function.name == "note_city"
    assert set(json.loads(call.function.arguments)) == set(CITY["required"])
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    turn = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "noted"},
    ]
    last = client.chat.completions.create(
        **{**arguments, "messages": turn, "tool_choice": "none", "max_tokens": 5}  # type: ignore[call-overload]
    )
    assert last.choices[0].message.content


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"no-such-model.*{MODEL}"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match=r"9000 tokens.*8192") as caught:
        client.completions.create(model=MODEL, prompt=[17] * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")
    assert client.models.list().data[0].id == MODEL
