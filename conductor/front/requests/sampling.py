"""Sampling parameters: from a request's fields to the parameters by which workers draw.

Owns: defaults, seeds, and checks against the vocabulary. Does not know: prompts, the draw itself.
"""

import hashlib
import secrets

import msgspec

from conductor.front.errors import tokens_in_words
from conductor.front.openai.model import FrontTokenizer, ServedModel
from conductor.front.openai.prompt import check_token_ids
from conductor.front.openai.schema import (
    MAX_BAD_WORD_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    shortened,
)
from conductor.front.requests.grammars import WantedGrammar
from mooncake.errors import RequestError
from mooncake.messages.requests import SamplingParams

_SEED_BITS = 63


class Sampling:
    """The checked sampling fields of one HTTP request. The constructor raises RequestError."""

    def __init__(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        model: ServedModel,
        grammar: WantedGrammar | None,
    ) -> None:
        if grammar is not None:
            _check_beside_grammar(request, grammar)
        self._seed = request.seed
        self._min_tokens = request.min_tokens or 0
        self._base = SamplingParams(
            max_tokens=1,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=min(max(request.top_k or 0, 0), model.tokenizer.vocab_size),
            min_p=request.min_p or 0.0,
            stop_token_ids=_stop_token_ids(request, model),
            min_tokens=self._min_tokens,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_logit_bias(request.logit_bias or {}, model),
            bad_words=_bad_words(request.bad_words or [], model),
            grammar="" if grammar is None else grammar.text,
            num_logprobs=_num_logprobs(request),
        )

    def params(self, max_tokens: int, choice: int) -> SamplingParams:
        """Return the sampling parameters of a prompt's choice number `choice`, counted from 0.

        Raises RequestError if `min_tokens` is more than `max_tokens`.
        """
        if self._min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {self._min_tokens}, but the answer has at most"
                f" {tokens_in_words(max_tokens)}; reduce it or raise max_tokens",
                param="min_tokens",
                code="invalid_value",
            )
        return msgspec.structs.replace(
            self._base, max_tokens=max_tokens, seed=_choice_seed(self._seed, choice)
        )


def _check_beside_grammar(request: ChatCompletionRequest | CompletionRequest, grammar: WantedGrammar) -> None:
    """Check that a request with a grammar has no field that forbids tokens.

    Raises RequestError, as such a field could forbid all tokens that the grammar allows.
    """
    for field in ("min_tokens", "bad_words", "ignore_eos"):
        if getattr(request, field):
            raise RequestError(
                f"{field} cannot be combined with {grammar.field}, which decides where the answer ends",
                param=field,
                code="invalid_value",
            )


def _stop_token_ids(
    request: ChatCompletionRequest | CompletionRequest, model: ServedModel
) -> tuple[int, ...]:
    given = request.stop_token_ids or []
    check_token_ids(given, model, "stop_token_ids")
    # A tokenizer may know more tokens than the model has weights for: those are never drawn.
    known = [token_id for token_id in model.tokenizer.eos_token_ids if token_id < model.vocab_size]
    eos = [] if request.ignore_eos else known
    return tuple(dict.fromkeys([*eos, *given]))


def _logit_bias(given: dict[str, float], model: ServedModel) -> dict[int, float]:
    """Return biases by token id. In `given` the ids are strings, as keys in JSON are. Raises RequestError."""
    vocab_size = min(model.vocab_size, model.tokenizer.vocab_size)
    for key in given:
        # A number that is too long for a token id may be too long to be read as a number.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1} as keys, got {shortened(key)!r}",
                param="logit_bias",
                code="invalid_value",
            )
    return {int(key): bias for key, bias in given.items()}


def _bad_words(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word, in one or two forms. Raises RequestError.

    The first form is the word at the beginning of a text. The second form is the word behind a space, if it
    has as many tokens there but another first token.
    """
    forms: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        path = f"bad_words[{index}]"
        bare = _encode(word.lstrip(), model.tokenizer, path)
        spaced = _encode(" " + word.lstrip(), model.tokenizer, path)
        if not bare:
            raise RequestError(f"{path} has no token", param=path, code="invalid_value")
        check_token_ids([*bare, *spaced], model, path)
        forms.append(tuple(bare))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            forms.append(tuple(spaced))
    distinct = tuple(dict.fromkeys(forms))
    if (num_tokens := sum(map(len, distinct))) > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words: they have {tokens_in_words(num_tokens)} together, and at most {MAX_BAD_WORD_TOKENS}"
            " are allowed",
            param="bad_words",
            code="invalid_value",
        )
    return distinct


def _encode(text: str, tokenizer: FrontTokenizer, path: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        raise RequestError(f"{path}: {error}", param=path, code="invalid_value") from None


def _num_logprobs(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            "top_logprobs is only allowed with logprobs: true", param="top_logprobs", code="invalid_value"
        )
    return None


def _choice_seed(seed: int | None, index: int) -> int:
    """Return the seed of a prompt's choice: a random one if the client gave no seed.

    The first choice (index 0) has the client's seed, for any `n`.
    """
    if seed is None:
        return secrets.randbits(_SEED_BITS)
    if index == 0:
        return seed & ((1 << _SEED_BITS) - 1)
    digest = hashlib.sha256(f"mooncake-seed\0{seed}\0{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)
