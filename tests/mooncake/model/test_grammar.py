"""What grammars allow, what they refuse, and that neither depends on how tokens come."""

import asyncio
import json
import random

import numpy as np
import pytest

from mooncake.errors import GrammarError
from mooncake.model.grammar import MAX_GRAMMAR_BYTES, Grammar, Grammars, GrammarState, Vocabulary
from tests.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, tiny_backend

BACKEND = tiny_backend()
WEIGHTS_FOR = VOCAB_SIZE + 5  # a model's vocabulary is often larger than its tokenizer's
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
OBJECT = f"start: %json {json.dumps(SCHEMA)}\n"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(BACKEND, (IM_END_ID, 10_000), WEIGHTS_FOR)


def compiled(vocabulary: Vocabulary, text: str) -> Grammar:
    return asyncio.run(Grammars(lambda: vocabulary).get(text))


def tokens_of(text: str) -> list[int]:
    ids: list[int] = BACKEND.encode(text, add_special_tokens=False).ids
    return ids


def allowed(state: GrammarState, tokens: list[int]) -> set[int]:
    bits = np.unpackbits(state.allowed_after(tokens), bitorder="little")
    assert state.error is None
    return {int(token) for token in bits.nonzero()[0]}


def test_every_prefix_of_a_fitting_text_allows_its_next_token(vocabulary: Vocabulary) -> None:
    tokens = [*tokens_of('{"name": "é🎉\\n", "n": -12}'), IM_END_ID]
    state = compiled(vocabulary, OBJECT).begin()
    for position, token in enumerate(tokens):
        assert token in allowed(state, tokens[:position])
    assert allowed(state, tokens) == {IM_END_ID}


def test_what_is_allowed_depends_on_the_tokens_alone(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, OBJECT)
    tokens = tokens_of('{"name": "abc", "n": 1')
    step_by_step = grammar.begin()
    for position in range(len(tokens)):
        step_by_step.allowed_after(tokens[:position])
    assert allowed(step_by_step, tokens) == allowed(grammar.begin(), tokens)
    assert allowed(step_by_step, tokens) == allowed(step_by_step, tokens)


def test_any_way_through_a_grammar_ends_in_what_it_describes(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, OBJECT)
    for seed in range(5):
        random_, state, tokens = random.Random(seed), grammar.begin(), list[int]()
        while tokens[-1:] != [IM_END_ID]:
            choices = allowed(state, tokens)
            assert max(choices) < VOCAB_SIZE
            # A long number is a number; the end must come some time.
            tokens.append(IM_END_ID if IM_END_ID in choices else random_.choice(sorted(choices)))
            assert len(tokens) < 500
        value = json.loads(BACKEND.decode(tokens[:-1]))
        assert set(value) == {"name", "n"}
        assert len(value["name"]) <= 6
        assert isinstance(value["n"], int)


def test_a_token_that_does_not_fit_is_an_error_and_only_the_end_may_follow(vocabulary: Vocabulary) -> None:
    state = compiled(vocabulary, OBJECT).begin()
    bits = np.unpackbits(state.allowed_after(tokens_of("Hello")), bitorder="little")
    assert state.error is not None
    assert bits.nonzero()[0].tolist() == [IM_END_ID]


def test_special_tokens_are_not_the_text_that_they_are_written_as(vocabulary: Vocabulary) -> None:
    assert IM_END_ID not in allowed(compiled(vocabulary, 'start: "<|im_end|>"').begin(), [])
    assert allowed(compiled(vocabulary, 'start: <[1]> "x"').begin(), []) == {1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "Expected|expected"),
        ('start: %json {"type": "strin"}', "strin"),
        ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('start: %json {"$ref": "http://127.0.0.1:9/x"}', "127.0.0.1"),
        (f'start: "{"x" * MAX_GRAMMAR_BYTES}"', f"{MAX_GRAMMAR_BYTES + 9} bytes"),
        (f'start: "{"é" * (MAX_GRAMMAR_BYTES // 2)}"', f"{MAX_GRAMMAR_BYTES + 9} bytes"),
        ('start: %json {"enum": [' + ", ".join(f'"v{i}{i}{i}"' for i in range(2000)) + "]}", None),
        ('start: %json {"type": "string", "pattern": "((((a{0,99}){0,99}){0,99}b){0,99})"}', None),
        ('start: start "x" | start start | "y"', None),
    ],
)
def test_a_hostile_grammar_is_refused_or_followed_within_limits(
    vocabulary: Vocabulary, text: str, reason: str | None
) -> None:
    if reason is not None:
        with pytest.raises(GrammarError, match=reason) as caught:
            compiled(vocabulary, text)
        assert len(str(caught.value)) < 400
        return
    try:
        state, tokens, random_ = compiled(vocabulary, text).begin(), list[int](), random.Random(0)
    except GrammarError:
        return
    for _ in range(50):
        bits = np.unpackbits(state.allowed_after(tokens), bitorder="little")
        tokens.append(random_.choice(bits.nonzero()[0].tolist()))


def test_a_model_without_an_end_has_no_grammars() -> None:
    grammars = Grammars(lambda: Vocabulary(BACKEND, (), VOCAB_SIZE))
    with pytest.raises(GrammarError, match="no token that ends"):
        asyncio.run(grammars.get(OBJECT))


def test_a_vocabulary_that_is_prepared_is_not_loaded_again(vocabulary: Vocabulary) -> None:
    loads = iter([vocabulary])
    grammars = Grammars(lambda: next(loads))
    grammars.prepare()
    grammars.compile(OBJECT)
    assert next(loads, None) is None


def test_a_vocabulary_that_cannot_be_prepared_is_told_of_when_a_grammar_comes() -> None:
    grammars = Grammars(lambda: Vocabulary(BACKEND, (), VOCAB_SIZE))
    grammars.prepare()
    with pytest.raises(GrammarError, match="no token that ends"):
        grammars.compile(OBJECT)


async def test_a_grammar_is_compiled_once_while_it_is_kept(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    first = await grammars.get('start: "a"')
    for number in range(31):
        await grammars.get(f'start: "{number}"')
    assert await grammars.get('start: "a"') is first
    await grammars.get('start: "more"')
    assert await grammars.get('start: "a"') is first
    for number in range(32):
        await grammars.get(f'start: "again {number}"')
    assert await grammars.get('start: "a"') is not first


async def test_a_grammar_that_many_want_at_once_is_compiled_once(vocabulary: Vocabulary) -> None:
    """The choices of an answer have one grammar, and others wait for the thread that compiles."""
    grammars = Grammars(lambda: vocabulary)
    first, *others = await asyncio.gather(*(grammars.get(OBJECT) for _ in range(8)))
    assert all(other is first for other in others)
