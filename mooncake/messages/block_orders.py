"""The Conductor's orders to workers about blocks in their instance's pool. None needs an answer.

Owns: this vocabulary. Does not know: why blocks are kept or copied.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolShard


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Order to pin the blocks of `keys` that the pool has, for `ttl_s` seconds or until `Unpin`.

    Needs no answer.

    Pinned blocks are evicted after all others, so running requests still find room.
    """

    keys: list[BlockKey]
    ttl_s: float


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Order to unpin these blocks. Needs no answer."""

    keys: list[BlockKey]


class Replicate(msgspec.Struct, tag=True, frozen=True):
    """Order to fetch missing blocks of a prefix into the pool, in the background. Needs no answer.

    The fetch is given up after `timeout_s` seconds, and if the pool has no room. The blocks are not pinned.
    """

    keys: list[BlockKey]
    shards: tuple[PoolShard, ...]
    """The shards of the instance that has the blocks."""
    timeout_s: float


class DropCopies(msgspec.Struct, tag=True, frozen=True):
    """Order to drop those blocks of `keys` that are neither in use nor pinned. Needs no answer.

    Other instances hold these blocks too.
    """

    keys: list[BlockKey]


BlockOrder = Pin | Unpin | Replicate | DropCopies
"""The orders about blocks in an instance's pool."""
