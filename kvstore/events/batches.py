"""The KV events of one instance's pool, in numbered batches.

The pool reports a block as soon as the block can be found, or can no longer be found. A publisher seals the
collected events into a batch and sends it. The latest batches stay here for replays. Between two seals,
consecutive events of one kind and tier become one event. Everything runs in one thread, so a snapshot of the
pool that is taken right after a seal, with no await in between, is the state after exactly that batch.

Owns: the order and numbers of events, the latest batches. Does not know: sockets, time, the contents of the
pool.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier

MAX_BATCH_BLOCKS = 10_000
"""The largest number of blocks in a batch. The message of a full batch has some 200 KB.

A full batch is sealed automatically, so the log is bounded even if no caller seals.
"""


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """The tokens of a full block, for routers that hash tokens themselves.

    `parent` is the key of the block before this one; None for a first block (the root key is no block).
    Requests of other tenants must not match a block that was stored under a `cache_salt`: report such a block
    without tokens.
    `token_ids` are kept until the batch leaves the log, so give something compact (`array("I")`,
    `memoryview.cast("I")`) and never change it.
    """

    parent: BlockKey | None
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events between two seals, oldest first. Immutable."""

    sequence: int
    events: list[KVEvent]
    tokens: dict[BlockKey, BlockTokens]
    """The tokens of stored blocks, for blocks whose tokens are known."""


class EventLog:
    """A collector of events, which keeps the last `capacity_batches` batches.

    The first event of a log is `KVCleared`.
    """

    def __init__(self, capacity_batches: int) -> None:
        self.capacity_batches = capacity_batches
        self.next_sequence = 0
        """Number of the batch that is being collected."""
        self._batches: deque[EventBatch] = deque(maxlen=capacity_batches)
        self._listeners: list[Callable[[], None]] = []
        self._events: list[KVEvent]
        self._tokens: dict[BlockKey, BlockTokens]
        self._num_blocks: int
        self._kind: type[KVStored | KVRemoved] | None
        self._tier: Tier | None
        self._keys: list[BlockKey]
        """Keys of the last event. Further keys of the same kind and tier are added to this list."""
        self._start_batch()
        # Numbers begin anew in each process: followers of an earlier process must forget its events.
        self.cleared()

    def on_event(self, listener: Callable[[], None]) -> None:
        """Register the listener, which is called at the first event of each new batch.

        The call comes in the middle of a change of the pool, so the listener must not use the pool.
        """
        self._listeners.append(listener)

    # -- collecting: called for every block, so kept below a microsecond ---------------------------

    def stored(self, tier: Tier, key: BlockKey, tokens: BlockTokens | None = None) -> None:
        """Record that `key` can be found in `tier` now.

        Must not be called again for this block before the block is removed from the tier.
        """
        if tokens is not None:
            self._tokens[key] = tokens
        self._collect(KVStored, tier, key)

    def stored_all(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Record many stored blocks at once, which is faster than one by one."""
        self._collect_all(KVStored, tier, keys)

    def removed(self, tier: Tier, key: BlockKey) -> None:
        """Record that `key` can no longer be found in `tier`."""
        self._collect(KVRemoved, tier, key)

    def removed_all(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Record many removed blocks at once, which is faster than one by one."""
        self._collect_all(KVRemoved, tier, keys)

    def cleared(self) -> None:
        """Record that no block can be found any more, in any tier. Events since the last seal are dropped."""
        self._start_batch()
        self._events.append(KVCleared())
        self._notify()

    def _collect(self, kind: type[KVStored | KVRemoved], tier: Tier, key: BlockKey) -> None:
        if kind is not self._kind or tier is not self._tier:
            self._kind, self._tier, self._keys = kind, tier, []
            self._events.append(kind(tier, self._keys))
        self._keys.append(key)
        self._num_blocks += 1
        if self._num_blocks == 1:
            self._notify()
        elif self._num_blocks == MAX_BATCH_BLOCKS:
            self.seal()

    def _collect_all(self, kind: type[KVStored | KVRemoved], tier: Tier, keys: Sequence[BlockKey]) -> None:
        while keys:
            self._collect(kind, tier, keys[0])
            # The block that fills a batch goes through `_collect`, which seals the batch.
            room = MAX_BATCH_BLOCKS - 1 - self._num_blocks if self._num_blocks else 0
            rest = keys[1 : 1 + room]
            self._keys += rest
            self._num_blocks += len(rest)
            keys = keys[1 + len(rest) :]

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _start_batch(self) -> None:
        self._events, self._tokens, self._num_blocks = [], {}, 0
        self._kind, self._tier, self._keys = None, None, []

    # -- batches ------------------------------------------------------------------------------------

    def seal(self) -> EventBatch | None:
        """Return the collected events as a batch with the next number; None without events."""
        if not self._events:
            return None
        batch = EventBatch(self.next_sequence, self._events, self._tokens)
        self._batches.append(batch)
        self.next_sequence += 1
        self._start_batch()
        return batch

    @property
    def oldest_sequence(self) -> int:
        """The number of the oldest batch that is kept; `next_sequence` if no batch is kept."""
        return self.next_sequence - len(self._batches)

    def since(self, sequence: int) -> list[EventBatch] | None:
        """Return all sealed batches from number `sequence` on.

        Returns None if some of them are gone, or if the number is not of this log.
        """
        if not self.oldest_sequence <= sequence <= self.next_sequence:
            return None
        return list(itertools.islice(self._batches, sequence - self.oldest_sequence, None))
