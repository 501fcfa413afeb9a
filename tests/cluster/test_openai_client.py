"""The official OpenAI client against a real cluster with the default model."""

import openai
import pytest

from tests.cluster.harness import Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(default_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="any", max_retries=0, timeout=60)


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


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32, stop=["is Par", "never"]
    )
    assert answer.choices[0].message.content == "The capital of France "
    assert answer.choices[0].finish_reason == "stop"


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
