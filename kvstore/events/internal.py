"""KV events for the Conductor, in the messages of `mooncake.messages.kv_events`.

Owns: this format. Does not know: sockets, the pool.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec
import zmq

from kvstore.events.batches import EventBatch, EventLog
from kvstore.events.publisher import FLUSH_INTERVAL_S, Publisher
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import (
    EventsGone,
    GetSnapshot,
    KVEvents,
    KVSnapshot,
    ReplayDone,
    ReplayEvents,
    ToKVEvents,
)
from mooncake.messages.pools import Tier
from mooncake.security.curve import Gate
from mooncake.security.keys import ClusterKey

Snapshot = Callable[[], Iterable[tuple[Tier, list[BlockKey]]]]
"""A function that returns the blocks of the pool by tier, as they are after the log's last event."""

KV_TOPIC = b"kv"
"""The ZeroMQ topic of every batch."""
SNAPSHOT_PART_KEYS = 20_000
"""Keys in one message of a snapshot: 360 KB. A snapshot of a million blocks has 50 such parts."""

_encode = msgspec.msgpack.Encoder().encode


class InternalPublisher(Publisher):
    """A publisher of batches, replays and snapshots, to peers that have the cluster key.

    The connections are encrypted. A publisher needs a running event loop.
    """

    def __init__(
        self,
        events: EventLog,
        snapshot: Snapshot,
        *,
        instance: str,
        incarnation: int,
        endpoint: str,
        request_endpoint: str,
        key: ClusterKey,
        flush_interval_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        self._gate = Gate(key, zmq.PUB, zmq.ROUTER)
        pub, router = self._gate.sockets
        super().__init__(events, pub, router, endpoint, request_endpoint, flush_interval_s)
        self._snapshot = snapshot
        self._life = instance, incarnation
        self._decode = msgspec.msgpack.Decoder(ToKVEvents).decode

    @property
    def num_refused(self) -> int:
        """The number of connections that were closed because the peer had another cluster key, or no key."""
        return self._gate.num_refused

    @property
    def num_unfinished(self) -> int:
        """The number of connections that ended in the middle of their handshake."""
        return self._gate.num_unfinished

    def close(self) -> None:
        self._gate.close()

    def _frames(self, batch: EventBatch) -> list[bytes]:
        return [KV_TOPIC, self._encoded(batch)]

    def _encoded(self, batch: EventBatch) -> bytes:
        return _encode(KVEvents(*self._life, batch.sequence, batch.events))

    def _answer(self, request: list[bytes]) -> Iterator[list[bytes]] | None:
        if len(request) != 1:
            return None
        try:
            message: ReplayEvents | GetSnapshot = self._decode(request[0])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if isinstance(message, GetSnapshot):
            return self._snapshot_parts()
        return self._replay(message.from_sequence)

    def _replay(self, from_sequence: int) -> Iterator[list[bytes]]:
        self._events.seal()
        next_sequence = self._events.next_sequence
        batches = self._events.since(from_sequence)
        if batches is None:
            yield [_encode(EventsGone(*self._life, self._events.oldest_sequence, next_sequence))]
            return
        for batch in batches:
            yield [self._encoded(batch)]
        yield [_encode(ReplayDone(*self._life, next_sequence))]

    def _snapshot_parts(self) -> Iterator[list[bytes]]:
        # No await between the seal and the copy: the copy is the state after the batch that was sealed last.
        self._events.seal()
        sequence = self._events.next_sequence - 1
        parts = [
            (tier, keys[start : start + SNAPSHOT_PART_KEYS])
            for tier, keys in self._snapshot()
            for start in range(0, len(keys), SNAPSHOT_PART_KEYS)
        ] or [(Tier.DRAM, [])]
        for index, (tier, keys) in enumerate(parts, start=1):
            yield [_encode(KVSnapshot(*self._life, sequence, tier, keys, is_last=index == len(parts)))]
