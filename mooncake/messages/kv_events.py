"""KV events, by which followers mirror the pool of a messenger.

Batches are published on a PUB socket, numbered from 0 in each incarnation; a ROUTER socket answers requests
for missed batches and for snapshots. To mirror a pool: subscribe, ask for a snapshot, then apply every batch
behind the snapshot, in order and once. After a gap ask for a replay; when the missed batches are gone, or the
incarnation has changed, forget everything and ask for a snapshot.

Owns: this vocabulary. Does not know: sockets, vLLM's format of KV events.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier


class KVStored(msgspec.Struct, tag=True, frozen=True):
    """The event that blocks can be found in `tier` from now on."""

    tier: Tier
    keys: list[BlockKey]


class KVRemoved(msgspec.Struct, tag=True, frozen=True):
    """The event that blocks are no longer in `tier`; other tiers may still have them."""

    tier: Tier
    keys: list[BlockKey]


class KVCleared(msgspec.Struct, tag=True, frozen=True):
    """The event that the pool is empty in every tier. Batch 0 begins with it."""


KVEvent = KVStored | KVRemoved | KVCleared


class KVEvents(msgspec.Struct, tag=True, frozen=True):
    """One batch of events: the changes of an instance's part of the pool, oldest first."""

    instance: str
    incarnation: int
    sequence: int
    events: list[KVEvent]


class ReplayEvents(msgspec.Struct, tag=True, frozen=True):
    """The request for every batch from `from_sequence` on.

    Answered by these batches and `ReplayDone`, or by `EventsGone`.
    """

    from_sequence: int


class ReplayDone(msgspec.Struct, tag=True, frozen=True):
    """The end of a replay: all batches before `next_sequence` have been sent."""

    instance: str
    incarnation: int
    next_sequence: int


class EventsGone(msgspec.Struct, tag=True, frozen=True):
    """The refusal of a replay, as only batches `[oldest_sequence, next_sequence)` are left.

    The follower then asks for a snapshot.
    """

    instance: str
    incarnation: int
    oldest_sequence: int
    next_sequence: int


class GetSnapshot(msgspec.Struct, tag=True, frozen=True):
    """The request for a snapshot, which is sent in parts.

    If the follower asks again before the last part is sent, the remaining parts are dropped, and a newer
    snapshot is sent.
    """


class KVSnapshot(msgspec.Struct, tag=True, frozen=True):
    """A part of a snapshot of the pool's contents after batch `sequence`.

    Every key of every tier is in exactly one part. All parts have the same `sequence`; a part with another
    `sequence` begins a new snapshot. The snapshot of an empty pool is one part without keys.
    """

    instance: str
    incarnation: int
    sequence: int
    tier: Tier
    keys: list[BlockKey]
    is_last: bool


ToKVEvents = ReplayEvents | GetSnapshot
FromKVEvents = KVEvents | ReplayDone | EventsGone | KVSnapshot
