"""The beginning of prompts that a context cache holds, as the processes that read requests get it.

Owns: which requests may continue the beginning. Does not know: the cache, its blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from conductor.front.openai.body import refusing_depth
from conductor.front.openai.prompt import ChatPrefix
from conductor.front.openai.tools import ToolFields
from mooncake.errors import RequestError


class Beginning(NamedTuple):
    """The beginning of prompts, as a context cache holds it.

    A beginning can be pickled, so that the processes that read requests can get it.
    """

    token_ids: list[int]
    chat_prefix_json: bytes | None
    """The `ChatPrefix` in JSON; None if the cache was made of tokens or a text."""
    cache_salt: str | None

    def check_salt(self, cache_salt: str | None) -> None:
        """Check that a request's salt is absent, or equal to the cache's salt. Raises RequestError."""
        if cache_salt not in (None, self.cache_salt):
            raise RequestError(
                "the context cache was made with another cache_salt; leave cache_salt out, or use its own",
                param="cache_salt",
                code="invalid_value",
            )

    def chat_prefix(self, tools: Sequence[ToolFields]) -> ChatPrefix:
        """Return the cached beginning of conversations. `tools` are the tools of the request itself.

        Raises RequestError if the request has tools, or if the cache was made of tokens or a text.
        """
        if self.chat_prefix_json is None:
            raise RequestError(
                "this context cache was made from a prompt, and no conversation begins with that; use it in"
                " /v1/completions, or make one from messages",
                param="context_cache",
                code="invalid_value",
            )
        if tools:
            raise RequestError(
                "tools are at the beginning of a prompt, so they come with its context cache",
                param="tools",
                code="invalid_value",
            )
        with refusing_depth():
            return ChatPrefix.from_json(self.chat_prefix_json)

    def num_shared(self, prompt: Sequence[int]) -> int:
        """Return the number of leading tokens that the prompt has in common with the cache."""
        return _num_common(self.token_ids, prompt)


def _num_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of leading tokens that `tokens` and `others` have in common."""
    if tokens == others[: len(tokens)]:
        return len(tokens)
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(others))
