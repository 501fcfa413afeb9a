"""What `/tokenize` and `/detokenize` say, and what they refuse."""

import json
from typing import Any

import httpx
import pytest

from conductor.front.requests.tokenization import AboutTokens, answer_about_tokens, detokenize, tokenize
from mooncake.errors import RequestError
from tests.conductor.front.fakes import DEADLINE_S, EOS, MODEL_NAME, Running, byte_model

MODEL = byte_model(context_len=100)


def tokenized(**fields: Any) -> dict[str, Any]:
    return tokenize(json.dumps(fields).encode(), MODEL, MODEL_NAME)


def test_a_text() -> None:
    assert tokenized(prompt="hé") == {
        "count": 3,
        "max_model_len": 100,
        "tokens": list("hé".encode()),
        "token_strs": None,
    }
    assert tokenized(prompt="hé", return_token_strs=True)["token_strs"] == ["h", "\ufffd", "\ufffd"]
    assert tokenized(prompt="")["count"] == 0


@pytest.mark.parametrize(
    ("fields", "is_brief"),
    [
        ({"prompt": "hi"}, True),
        ({"prompt": "hi", "return_token_strs": True}, False),
        ({"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}, False),
    ],
)
def test_strings_of_tokens_are_not_made_where_only_brief_answers_are(
    fields: dict[str, Any], is_brief: bool
) -> None:
    body = json.dumps(fields).encode()
    answer = answer_about_tokens(AboutTokens.TOKENIZE, body, MODEL, MODEL_NAME, only_brief=True)
    assert (answer is not None) == is_brief


def test_a_conversation_with_and_without_the_assistants_turn() -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert bytes(tokenized(messages=hi, model=MODEL_NAME)["tokens"]) == b"user: hi\nassistant: "
    assert bytes(tokenized(messages=hi, add_generation_prompt=False)["tokens"]) == b"user: hi\n"


def test_special_tokens_are_written_out() -> None:
    body = json.dumps({"tokens": [104, 105, EOS]}).encode()
    assert detokenize(body, MODEL, MODEL_NAME) == {"prompt": "hi<end>"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenized(**fields)
    assert caught.value.param == param


def test_an_unknown_field_is_called_so() -> None:
    with pytest.raises(RequestError, match="unknown field 'mood'") as caught:
        tokenized(prompt="x", mood=1)
    assert (caught.value.param, caught.value.code) == ("mood", "unknown_parameter")


def test_over_http(front: Running) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(front.url + path, json=body, timeout=DEADLINE_S)

    tokens = post("/tokenize", prompt="hi").json()["tokens"]
    assert post("/detokenize", tokens=tokens).json() == {"prompt": "hi"}
    refused = post("/detokenize", tokens=[EOS + 1])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens[0]")
    assert httpx.get(f"{front.url}/version", timeout=DEADLINE_S).json().keys() == {"version"}
    assert httpx.get(f"{front.url}/live", timeout=DEADLINE_S).status_code == 200
