"""Ghosts: what was evicted lately, so that a miss can say whether more memory would have made it a hit.

A direct-mapped table of key prefixes with one entry a page: a new ghost may replace an old one.

Owns: memories. Does not know: the pool.
"""

import numpy as np

from mooncake.messages.blocks import BlockKey

_MOST_GHOSTS = 1 << 20
_ID_BYTES = 8


class Ghosts:
    """Remembers about `num_blocks` keys in 8 bytes each."""

    def __init__(self, num_blocks: int) -> None:
        size = 1 << min(num_blocks, _MOST_GHOSTS).bit_length()
        self._ids = np.zeros(size, np.uint64)
        self._mask = size - 1

    def add(self, key: BlockKey) -> None:
        ghost = int.from_bytes(key[:_ID_BYTES], "little")
        self._ids[ghost & self._mask] = ghost

    def reason(self, key: BlockKey) -> str:
        """Why this block is not here: "evicted" lately, or "absent"."""
        ghost = int.from_bytes(key[:_ID_BYTES], "little")
        return "evicted" if self._ids[ghost & self._mask] == ghost else "absent"
