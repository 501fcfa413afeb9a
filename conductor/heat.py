"""How often each block has lately been asked for: counts that fade (Mooncake, sections 3 and 6.2).

Prompts are noted when they come and counted later, all at once, so that noting costs a decision nothing.
Keys are chained: no block of a prompt is hotter than those before it.

Owns: the counts. Does not know: who holds a block, the clock.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

from mooncake.blocks import BlockKey

HALF_LIFE_S = 60.0
MOST_KEYS = 1 << 15
"""that are remembered, the hottest: some 4 MB"""
MOST_NOTED_BLOCKS = 1 << 17
"""between two counts; prompts beyond are not counted"""
_LEAST_USES = 0.5
"""with less a block is forgotten"""


class Heat:
    """Uses of blocks; one use counts half after `HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._uses: dict[BlockKey, float] = {}
        self._noted: list[Sequence[BlockKey]] = []
        self._num_noted_blocks = 0

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._uses)

    def note(self, keys: Sequence[BlockKey]) -> None:
        """A prompt with these blocks has come."""
        if keys and self._num_noted_blocks + len(keys) <= MOST_NOTED_BLOCKS:
            self._noted.append(keys)
            self._num_noted_blocks += len(keys)

    def count(self, seconds: float) -> list[Sequence[BlockKey]]:
        """What was noted since the last count, `seconds` ago; it is counted now."""
        noted, self._noted, self._num_noted_blocks = self._noted, [], 0
        fade = 0.5 ** (seconds / HALF_LIFE_S)
        uses = {key: left for key, num in self._uses.items() if (left := num * fade) >= _LEAST_USES}
        for key, num in Counter(chain.from_iterable(noted)).items():
            uses[key] = uses.get(key, 0.0) + num
        if len(uses) > MOST_KEYS:  # of equal ones the first, which are the first of their prompts
            hottest = sorted(uses.items(), key=itemgetter(1), reverse=True)
            uses = dict(hottest[: MOST_KEYS // 2])
        self._uses = uses
        return noted

    def uses(self, key: BlockKey) -> float:
        """Of one block."""
        return self._uses.get(key, 0.0)

    def depth(self, keys: Sequence[BlockKey], num_uses: float) -> int:
        """How many of a prompt's first blocks have more uses than these."""
        return bisect_left(keys, -num_uses, key=lambda key: -self.uses(key))
