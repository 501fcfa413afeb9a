"""KV events: what one instance's messenger tells whoever mirrors its pool.

Batches on a PUB socket, numbered from 0 in each incarnation, and a ROUTER socket for what a subscriber lacks.
To mirror: subscribe, ask for a snapshot, then apply every batch behind it, in order and once. After a gap ask
for a replay; when that is gone, or the incarnation is another one, forget everything and ask for a snapshot.

Owns: this vocabulary. Does not know: sockets, vLLM's format of the same.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier


class KVStored(msgspec.Struct, tag=True, frozen=True):
    """These blocks can be found in `tier` now."""

    tier: Tier
    keys: list[BlockKey]


class KVRemoved(msgspec.Struct, tag=True, frozen=True):
    """These blocks are no longer in `tier`; other tiers may still have them."""

    tier: Tier
    keys: list[BlockKey]


class KVCleared(msgspec.Struct, tag=True, frozen=True):
    """All that was stored before, in every tier, is gone. Batch 0 begins with it."""


KVEvent = KVStored | KVRemoved | KVCleared


class KVEvents(msgspec.Struct, tag=True, frozen=True):
    """One batch: what changed in an instance's part of the pool, oldest first."""

    instance: str
    incarnation: int
    sequence: int
    events: list[KVEvent]


class ReplayEvents(msgspec.Struct, tag=True, frozen=True):
    """Answered by every batch from `from_sequence` on and `ReplayDone`, or by `EventsGone`."""

    from_sequence: int


class ReplayDone(msgspec.Struct, tag=True, frozen=True):
    """All batches before `next_sequence` have been sent."""

    instance: str
    incarnation: int
    next_sequence: int


class EventsGone(msgspec.Struct, tag=True, frozen=True):
    """Only the batches `[oldest_sequence, next_sequence)` can be replayed: ask for a snapshot."""

    instance: str
    incarnation: int
    oldest_sequence: int
    next_sequence: int


class GetSnapshot(msgspec.Struct, tag=True, frozen=True):
    """Answered by the parts of a snapshot. Who asks again before the last part gets a newer one instead."""


class KVSnapshot(msgspec.Struct, tag=True, frozen=True):
    """A part of the pool's contents as they were after batch `sequence`.

    Every key of every tier is in exactly one part; all parts carry the same `sequence`, another one begins
    a new snapshot. An empty pool is one part without keys.
    """

    instance: str
    incarnation: int
    sequence: int
    tier: Tier
    keys: list[BlockKey]
    is_last: bool


ToKVEvents = ReplayEvents | GetSnapshot
FromKVEvents = KVEvents | ReplayDone | EventsGone | KVSnapshot
