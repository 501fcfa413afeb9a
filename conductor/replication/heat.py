"""The numbers of prompts that contain each block, as counts that decay (Mooncake, sections 3 and 6.2).

One prompt is one *use* of each of its blocks. Prompts are recorded when they arrive and counted later,
several at once. So counting does not delay decisions. Keys are chained: no block of a prompt is hotter than
the blocks before it.

Owns: the counts. Does not know: which instances hold blocks, the clock.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import chain, compress

import numpy as np

from mooncake.messages.blocks import BlockKey

HALF_LIFE_S = 60.0
"""Seconds after which a prompt counts only half."""
MOST_KEYS = 1 << 15
"""The most blocks that are remembered, some 4 MB. When there are more, the hottest half stays."""
MOST_NOTED_BLOCKS = 1 << 15
"""The most blocks that are recorded between two counts.

Counting holds up the Conductor's process, and so the streams of its own front.
"""
_LEAST_USES = 0.5
"""The number of uses below which a block is forgotten."""


class Heat:
    """The decayed numbers of uses of the hottest blocks."""

    def __init__(self) -> None:
        self._uses: dict[BlockKey, float] = {}
        self._noted: list[Sequence[BlockKey]] = []
        self._num_noted_blocks = 0

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return len(self._uses)

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Record a prompt with these blocks, to be counted later.

        Beyond `MOST_NOTED_BLOCKS` prompts are left out.
        """
        if keys and self._num_noted_blocks + len(keys) <= MOST_NOTED_BLOCKS:
            self._noted.append(keys)
            self._num_noted_blocks += len(keys)

    def count(self) -> list[Sequence[BlockKey]]:
        """Count the prompts that were recorded since the last count, and return them."""
        noted, self._noted, self._num_noted_blocks = self._noted, [], 0
        uses = self._uses
        for key, num in Counter(chain.from_iterable(noted)).items():
            uses[key] = uses.get(key, 0.0) + num
        if len(uses) > MOST_KEYS:
            self._uses = _hottest(uses, MOST_KEYS // 2)
        return noted

    def fade(self, seconds: float) -> None:
        """Let all counts decay by the seconds since the last call."""
        fade = 0.5 ** (seconds / HALF_LIFE_S)
        self._uses = {key: left for key, num in self._uses.items() if (left := num * fade) >= _LEAST_USES}

    def uses(self, key: BlockKey) -> float:
        """Return the decayed number of uses of one block."""
        return self._uses.get(key, 0.0)

    def depth(self, keys: Sequence[BlockKey], num_uses: float) -> int:
        """Return the number of a prompt's leading blocks that have more than `num_uses` uses each."""
        if not keys or self.uses(keys[0]) <= num_uses:
            return 0
        return bisect_left(keys, -num_uses, key=lambda key: -self.uses(key))


def _hottest(uses: dict[BlockKey, float], number: int) -> dict[BlockKey, float]:
    """Return the `number` hottest blocks, in their present order.

    Among equally hot blocks the first are taken, as they are earlier blocks of their prompts.
    """
    numbers = np.fromiter(uses.values(), np.float64, len(uses))
    least = np.partition(numbers, -number)[-number]
    is_kept = numbers > least
    (equal,) = (numbers == least).nonzero()
    is_kept[equal[: number - np.count_nonzero(is_kept)]] = True
    return dict(compress(uses.items(), is_kept.tolist()))
