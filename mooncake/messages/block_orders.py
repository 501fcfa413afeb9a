"""The Conductor's orders to workers about blocks in their instance's pool. None needs an answer.

Owns: this vocabulary. Does not know: why blocks are kept or copied.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolShard


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep those of these blocks that the pool has, for `ttl_s` or until `Unpin`. Needs no answer.

    Pinned blocks are evicted after all others, so running requests still find room.
    """

    keys: list[BlockKey]
    ttl_s: float


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Let these blocks be evicted like others again. Needs no answer."""

    keys: list[BlockKey]


class Replicate(msgspec.Struct, tag=True, frozen=True):
    """Fetch missing blocks of a prompt's beginning in the background, and keep them. Needs no answer.

    The fetch is given up after `timeout_s`.
    """

    keys: list[BlockKey]
    shards: tuple[PoolShard, ...]
    """Shards of the instance that has them."""
    timeout_s: float


class DropCopies(msgspec.Struct, tag=True, frozen=True):
    """Drop the named blocks that are in no use and under no pin: other instances hold them too.

    Needs no answer.
    """

    keys: list[BlockKey]


BlockOrder = Pin | Unpin | Replicate | DropCopies
"""Orders about blocks in an instance's pool."""
