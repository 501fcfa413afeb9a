"""Logprobs in OpenAI's two forms: of chats, and of plain completions.

Owns: the JSON of logprobs. Does not know: where logprobs come from.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from conductor.front.generation.generation import Delta
from mooncake.messages.requests import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""The least logprob that is shown, as JSON has no infinity. vLLM shows the same."""
TokenBytes = Callable[[int], bytes]


def of_chat(delta: Delta, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return a chat completion's logprobs, with an entry for each token that `usage` counts.

    A stop token at the end has an entry, too.
    """
    content = [
        {
            **_entry(token_id, of_token.logprob, token_bytes),
            "top_logprobs": [_entry(*likely, token_bytes) for likely in _top(of_token)],
        }
        for token_id, of_token in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_completion(delta: Delta, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return a plain completion's logprobs as columns.

    `top_logprobs` has the most likely tokens, and always the drawn token.
    """
    pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
    return {
        "tokens": [_piece(token_bytes, token_id)[0] for token_id, _ in pairs],
        "token_logprobs": [_shown(of_token.logprob) for _, of_token in pairs],
        "top_logprobs": [_by_text(token_id, of_token, token_bytes) for token_id, of_token in pairs],
        "text_offset": list(delta.offsets),
    }


def _by_text(token_id: int, of_token: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    shown: dict[str, float] = {}
    for likely, logprob in (*_top(of_token), (token_id, of_token.logprob)):
        # Tokens that are parts of characters have the same text. The likeliest of them stays.
        shown.setdefault(_piece(token_bytes, likely)[0], _shown(logprob))
    return shown


def _top(of_token: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(of_token.top_token_ids, of_token.top_logprobs, strict=True)


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    text, data = _piece(token_bytes, token_id)
    return {"token": text, "logprob": _shown(logprob), "bytes": data}


@lru_cache(1 << 15)
def _piece(token_bytes: TokenBytes, token_id: int) -> tuple[str, tuple[int, ...]]:
    """Return a token's text and bytes.

    Cached, as each token of an answer may come with twenty likely tokens that were not drawn.
    """
    data = token_bytes(token_id)
    return data.decode(errors="replace"), tuple(data)


def _shown(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
