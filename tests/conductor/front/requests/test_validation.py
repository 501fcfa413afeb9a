"""Requests become what OpenAI's reference says, or errors that name the field."""

import json
from dataclasses import replace
from typing import Any

import pytest

from conductor.front.requests.validation import ApiEndpoint, Job, fit_into_pool, read_job
from mooncake.errors import RequestError
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.fronts import ClusterState
from mooncake.messages.requests import SamplingParams
from tests.conductor.front.fakes import EOS, MODEL_NAME, byte_model

MODEL = byte_model(context_len=100)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Job:
    body = {"model": MODEL_NAME, "messages": USER, **fields}
    return read_job(ApiEndpoint.CHAT, json.dumps(body).encode(), MODEL, MODEL_NAME, max_choices=8)


def completion(**fields: Any) -> Job:
    body = {"model": MODEL_NAME, "prompt": "hi", **fields}
    return read_job(ApiEndpoint.COMPLETION, json.dumps(body).encode(), MODEL, MODEL_NAME, max_choices=8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [EOS + 1]}, "stop_token_ids[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(EOS + 1): 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x", " "]}, "bad_words[1]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": [f"{number:01000}" for number in range(5)]}, "bad_words"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "bad_words": ["x"]}, "bad_words"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"store": True}, "store"),
        ({"min_p": 1.1}, "min_p"),
        ({"no_such_field": None}, "no_such_field"),
        ({"model": None}, "model"),
    ],
)
def test_bad_chat_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.rsplit(".")[-1].split("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", [1]], "n": 5}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, EOS + 1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], [2, 2.5]]}, "prompt[1][1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"messages": USER}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_bad_completion_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b"nonsense", b'{"model": NaN}', b'"\xff"', b"[" * 50_000, b'{"a":' * 50_000),
        b'{"model": "m", "metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_bad_json_is_the_clients_mistake(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_job(ApiEndpoint.CHAT, body, MODEL, MODEL_NAME, max_choices=8)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 300


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError):
        completion(prompt="\ud800")


def test_error_never_repeats_a_large_input() -> None:
    with pytest.raises(RequestError) as caught:
        chat(temperature="9" * 10_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError) as caught:
        chat(**{"x" * 10_000: 1})
    assert len(str(caught.value)) < 300


def test_refusal_of_the_chat_template_is_the_clients_mistake() -> None:
    with pytest.raises(RequestError, match="user must begin") as caught:
        chat(messages=[{"role": "assistant", "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_unknown_model_is_404_and_names_the_served_one() -> None:
    with pytest.raises(RequestError, match=MODEL_NAME) as caught:
        chat(model="gpt-9")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_neutral_and_harmless_fields_are_accepted() -> None:
    job = chat(
        logprobs=False, top_logprobs=None, tools=[], tool_choice="none", presence_penalty=0, n=1, store=False,
        frequency_penalty=0.0, response_format={"type": "text"}, logit_bias={}, user="me", seed=None,
        metadata={"a": "b"}, stream_options=None, parallel_tool_calls=True, service_tier="auto",
        messages=[*USER, {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}, *USER],
    )  # fmt: skip
    assert len(job.sampling) == 1
    assert completion(best_of=1, echo=False, suffix=None, logprobs=None).sampling[0].max_tokens == 16


def test_content_parts_and_developer_role_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    job = chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}])
    assert bytes(job.prompts[0].token_ids) == b"system: s\nuser: a\nb\nassistant: "


def test_variables_reach_the_template_but_those_of_other_fields() -> None:
    job = chat(chat_template_kwargs={"enable_thinking": False})
    assert bytes(job.prompts[0].token_ids) == b"enable_thinking=False\nuser: hi\nassistant: "
    assert chat(chat_template_kwargs={}).prompts == chat().prompts
    for variables in ({"tools": []}, {"messages": []}, {"add_generation_prompt": False}, {"a": "x" * 100}, 3):
        with pytest.raises(RequestError) as caught:
            chat(chat_template_kwargs=variables)
        assert caught.value.param == "chat_template_kwargs"


def test_variables_that_a_template_writes_beside_each_message_make_no_endless_text() -> None:
    variables = {"bos_token": "x" * 10}
    assert chat(chat_template_kwargs=variables).prompts
    with pytest.raises(RequestError, match="too long") as caught:
        chat(chat_template_kwargs=variables, messages=[{"role": "user", "content": ""}] * 8)
    assert caught.value.param == "chat_template_kwargs"


def test_sampling_parameters() -> None:
    sampling = chat(temperature=0, top_p=0.5, top_k=-1, seed=7, stop_token_ids=[5], max_tokens=3).sampling[0]
    assert sampling == SamplingParams(
        max_tokens=3, temperature=0, top_p=0.5, top_k=0, seed=7, stop_token_ids=(EOS, 5)
    )
    sampling = chat(
        temperature=1, seed=7, max_tokens=9, min_p=0.1, min_tokens=4, repetition_penalty=1.2,
        presence_penalty=-1, frequency_penalty=0.5, logit_bias={"5": 1, "256": -100}, ignore_eos=True,
        bad_words=["ab", " ab", "é"], logprobs=True, top_logprobs=3,
    ).sampling[0]  # fmt: skip
    assert sampling == SamplingParams(
        max_tokens=9, temperature=1, seed=7, min_p=0.1, min_tokens=4, repetition_penalty=1.2,
        presence_penalty=-1, frequency_penalty=0.5, logit_bias={5: 1, 256: -100},
        bad_words=((97, 98), (0xC3, 0xA9)), num_logprobs=3,
    )  # fmt: skip
    assert chat(logprobs=True).sampling[0].num_logprobs == 0
    assert completion(logprobs=0).sampling[0].num_logprobs == 0
    assert completion(logprobs=5).sampling[0].num_logprobs == 5
    assert completion().sampling[0].num_logprobs is None
    assert chat(ignore_eos=True).sampling[0].stop_token_ids == ()
    assert chat().sampling[0].temperature == 1


def test_bad_words_are_also_forbidden_after_a_space_if_they_are_one_other_token_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = {"cat": [1], " cat": [2], "dog": [3], " dog": [4, 3], "rat": [5, 6], " rat": [7, 6]}
    monkeypatch.setattr(type(MODEL.tokenizer), "encode", lambda _, text, add_special_tokens: tokens[text])
    job = completion(prompt=[1], bad_words=["cat", " dog", "rat"])
    assert job.sampling[0].bad_words == ((1,), (2,), (3,), (5, 6), (7, 6))


def test_min_tokens_must_fit_the_answer_of_every_prompt() -> None:
    assert completion(prompt="x", min_tokens=16).sampling[0].min_tokens == 16
    with pytest.raises(RequestError, match=r"min_tokens is 17.* 16 tokens"):
        completion(prompt="x", min_tokens=17)
    with pytest.raises(RequestError, match=r"min_tokens is 16.* 5 tokens"):
        completion(prompt=["x", "x" * 95], min_tokens=16)


def test_each_choice_has_a_seed_of_its_own_and_the_first_does_not_depend_on_n() -> None:
    seeds = [sampling.seed for sampling in chat(seed=7, n=3).sampling]
    assert len(set(seeds)) == 3
    assert seeds == [sampling.seed for sampling in chat(seed=7, n=3).sampling]
    assert seeds[0] == chat(seed=7).sampling[0].seed
    assert chat().sampling[0].seed != chat().sampling[0].seed
    same = completion(prompt=["a", "a"], seed=7).sampling
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [b"ab"]), (["ab", "c"], [b"ab", b"c"]), ([97, 98], [b"ab"]), ([[97], [98, 99]], [b"a", b"bc"])],
)
def test_prompt_forms(prompt: Any, expected: list[bytes]) -> None:
    job = completion(prompt=prompt, n=2)
    assert [bytes(prompt.token_ids) for prompt in job.prompts] == expected
    requests = job.requests("ipc://reply")
    assert [bytes(request.token_ids) for request in requests] == [text for text in expected for _ in "xy"]
    assert [request.request_id for request in requests] == [f"{job.id}-{i}" for i in range(2 * len(expected))]


def test_block_keys_depend_on_model_and_salt() -> None:
    text = "x" * 40
    plain, salted = completion(prompt=text), completion(prompt=text, cache_salt="tenant")
    ids = list(text.encode())
    assert plain.prompts[0].keys == block_keys(ids, MODEL.block_size, root_key(MODEL.fingerprint))
    assert len(plain.prompts[0].keys) == 2
    assert not set(plain.prompts[0].keys) & set(salted.prompts[0].keys)


def test_max_tokens_defaults_fit_the_context() -> None:
    used = len(chat().prompts[0].token_ids)
    assert chat().sampling[0].max_tokens == 100 - used
    assert completion(prompt="x" * 90).sampling[0].max_tokens == 10
    assert completion(prompt="x" * 99, max_tokens=1).sampling[0].max_tokens == 1


def test_more_messages_than_tokens_fit_are_refused_before_each_is_looked_at() -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[1] * 101)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"messages\[0\]|messages\.0"):
        chat(messages=[1] * 100)


@pytest.mark.parametrize(
    ("prompt", "fields", "numbers"),
    [("x" * 100, {}, ["100 tokens"]), ("x" * 90, {"max_tokens": 11}, ["90", "11", "101", "100"])],
)
def test_context_length_exceeded_names_the_numbers(
    prompt: str, fields: dict[str, Any], numbers: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt, **fields)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert all(number in str(caught.value) for number in numbers)


def test_hopeless_input_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(MODEL.tokenizer), "encode", never)
    monkeypatch.setattr(type(MODEL.tokenizer), "render_chat", never)
    with pytest.raises(RequestError, match="101 characters"):
        completion(prompt="x" * 101)
    with pytest.raises(RequestError, match="120 characters"):
        chat(messages=[{"role": "user", "content": "x" * 60}] * 2)
    with pytest.raises(RequestError, match="101 messages"):
        chat(messages=USER * 101)
    with pytest.raises(RequestError, match="9 prompts"):
        completion(prompt=["x"] * 9)


def test_tokens_without_weights_are_refused_from_text_as_from_ids() -> None:
    small = replace(MODEL, vocab_size=100)
    for prompt in ("ab~", [97, 98, 126]):
        body = json.dumps({"model": MODEL_NAME, "prompt": prompt}).encode()
        with pytest.raises(RequestError, match=r"prompt\[2\]: expected a token id from 0 to 99, got 126"):
            read_job(ApiEndpoint.COMPLETION, body, small, MODEL_NAME, max_choices=8)


def test_top_k_of_any_size_fits_the_vocabulary() -> None:
    assert completion(top_k=2**200).sampling[0].top_k == MODEL.tokenizer.vocab_size
    assert completion(top_k=-1).sampling[0].top_k == 0


def test_what_no_pool_can_hold_is_refused_with_both_sizes() -> None:
    job = completion(prompt=["x", "x" * 32])
    assert fit_into_pool(job, ClusterState(1, 1, 1, max_sequence_blocks=3), MODEL.block_size) == job
    with pytest.raises(RequestError, match=r"32 tokens.*at most 32") as caught:
        fit_into_pool(job, ClusterState(1, 1, 1, max_sequence_blocks=2), MODEL.block_size)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    job = completion(prompt="x" * 40, max_tokens=9)
    with pytest.raises(RequestError, match=r"40 tokens and max_tokens is 9.*at most 48.*to 8") as caught:
        fit_into_pool(job, ClusterState(1, 1, 1, max_sequence_blocks=3), MODEL.block_size)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")


def test_default_output_length_is_cut_to_the_pool() -> None:
    job = fit_into_pool(chat(), ClusterState(1, 1, 1, max_sequence_blocks=3), MODEL.block_size)
    assert job.sampling[0].max_tokens == 48 - len(job.prompts[0].token_ids)


@pytest.mark.parametrize(
    ("fields", "param", "limits"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
            "tools",
            (128, 129),
        ),
        ({"bad_words": ["x"] * 200}, "bad_words", (128, 200)),
        ({"logit_bias": {str(n): 1 for n in range(1030)}}, "logit_bias", (1024, 1030)),
        ({"stop_token_ids": [n % 200 for n in range(1025)]}, "stop_token_ids", (1024, 1025)),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(33)}}, "chat_template_kwargs", (32, 33)),
    ],
)
def test_too_many_are_told_the_limit_and_how_many_came(
    fields: dict[str, Any], param: str, limits: tuple[int, int]
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert str(caught.value) == f"{param}: at most {limits[0]} are allowed, got {limits[1]}"
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("body", "position"), [(b'{"model": "x\xff"}', 12), (b'{"\xc3\xa9": "\xe2\x28"}', 8), (b"\xff", 0)]
)
def test_what_is_no_utf_8_is_told_where(body: bytes, position: int) -> None:
    with pytest.raises(RequestError, match=f"byte 0x{body[position]:02x} at position {position} is no UTF-8"):
        read_job(ApiEndpoint.CHAT, body, MODEL, MODEL_NAME, max_choices=8)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", '"temperature": 1e999'),
        ("max_tokens", '"max_tokens": 1%s' % ("0" * 5000)),
        ("prompt", '"prompt": [1, -1e999]'),
        ("10", '"logit_bias": {"10": 1e400}'),
    ],
)
def test_a_number_that_is_too_large_is_refused_by_its_field(field: str, body: str) -> None:
    whole = f'{{"model": "{MODEL_NAME}", {body}}}'.encode()
    with pytest.raises(RequestError, match=f"^{field}: expected a number within") as caught:
        read_job(ApiEndpoint.COMPLETION, whole, MODEL, MODEL_NAME, max_choices=8)
    assert caught.value.param == field


def test_one_token_is_not_several() -> None:
    with pytest.raises(RequestError, match=r"the prompt has 1 token and max_tokens is 100,"):
        completion(prompt="h", max_tokens=100)


def test_a_template_without_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def render_chat(*_: Any, **__: Any) -> list[int]:
        raise RecursionError

    monkeypatch.setattr(MODEL.tokenizer, "render_chat", render_chat)
    with pytest.raises(RequestError, match="chat template calls itself without end") as caught:
        chat()
    assert caught.value.param == "messages"
