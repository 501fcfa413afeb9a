"""Prompts with equal tokens where a trace has equal blocks, and with different tokens everywhere else.

Owns: the tokens of each block. Does not know: when prompts are sent.
"""

import numpy as np
import numpy.typing as npt

from benchmarks.tools.load.sources import Planned
from benchmarks.tools.traces.request import BLOCK_TOKENS

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "point", "home"),
    *("water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book"),
    *("eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend"),
    *("father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "name", "team"),
)
"""Words that are one token each for most tokenizers, with the space before them."""
_UNIQUE = 1 << 62
"""The first block id for prompts without `hash_ids`, which share nothing."""
_Words64 = npt.NDArray[np.uint64]


class PromptMaker:
    """A maker of prompts that share prefixes as the requests of a trace do.

    `token_ids` is the half-open range of token ids. With another `seed` all prompts are different, so that no
    cache has them. If lengths are scaled, blocks become shorter by the same factor.
    """

    def __init__(self, token_ids: tuple[int, int], seed: int, scale_lengths: float) -> None:
        self._first, self._span = token_ids[0], token_ids[1] - token_ids[0]
        self._seed, self._scale = seed, scale_lengths

    def tokens(self, request: Planned) -> list[int]:
        """Return a request's token ids.

        If the prompt ends within a block, it has the first tokens of the block.
        """
        positions = np.arange(request.num_input_tokens, dtype=np.uint64)
        drawn = _mixed(self._keys(request) + positions) % np.uint64(self._span)
        token_ids: list[int] = (self._first + drawn.astype(np.int64)).tolist()
        return token_ids

    def text(self, request: Planned) -> str:
        """Return a request's prompt as words, about one for each token."""
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.tokens(request))

    def _keys(self, request: Planned) -> _Words64:
        """Return for each token the key of its block, uint64 `[num_input_tokens]`."""
        hash_ids = request.hash_ids or (_UNIQUE + request.number,)
        seeded = _mixed(np.array(hash_ids, np.uint64) + _mixed(np.array([self._seed], np.uint64)))
        # The first token of block i is int(i * 512 * scale): by position alone, so equal in all prompts.
        starts = (np.arange(len(hash_ids)) * BLOCK_TOKENS * self._scale).astype(np.int64)
        ends = np.append(starts[1:], request.num_input_tokens).clip(max=request.num_input_tokens)
        return np.repeat(seeded, np.maximum(ends - np.minimum(starts, ends), 0))


def _mixed(values: _Words64) -> _Words64:
    """Return splitmix64 of each value: a hash in which neighbouring values have unrelated bits."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
