"""KV events as vLLM publishes them, so that existing KV-aware routers can follow an instance.

Owns: this format. Does not know: sockets, the pool, the clock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from kvstore.events.batches import BlockTokens, EventBatch, EventLog
from kvstore.events.open_peers import OpenPeers
from kvstore.events.publisher import FLUSH_INTERVAL_S, Publisher
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import KVCleared, KVRemoved, KVStored
from mooncake.messages.pools import Tier

MAX_REQUEST_BYTES = 1 << 10
"""The most bytes of a received frame. Frames have a topic or a number."""
MEDIA = {Tier.DRAM: "CPU", Tier.SSD: "DISK", Tier.DEVICE: "GPU"}
"""The name that vLLM gives each tier.

vLLM says CPU and, lately, STORAGE. Routers that tell tiers apart know DISK; only the newest routers know
STORAGE.
"""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message after the last batch of a replay: -1."""
_HASH_BYTES = 8
"""The number of a key's last bytes that make vLLM's integer hash."""

_encode = msgspec.msgpack.Encoder().encode


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    """Blocks that can be found, as vLLM's event.

    `lora_id` and `lora_name` have no default in vLLM, so strict decoders need them.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _EventBatch(msgspec.Struct, array_like=True):
    """A batch of events. The rank is always there, as some routers cannot read a batch without a rank."""

    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    data_parallel_rank: int = 0


class VllmPublisher(Publisher):
    """A publisher of KV events in vLLM's format: `[topic, 8-byte number, payload]`, and replays.

    - The publisher is open to every peer that reaches the sockets, as routers that follow this format have no
      cluster key. The number of peers, and the bytes that each sends, are bounded (`OpenPeers`).
    - `topic` is the first frame; some routers want `kv@<address of the instance>@<model>`.
    - `clock` gives the wall-clock time of a batch, in seconds.
    - A hash is a 64-bit integer made of the last 8 bytes of a key, because vLLM sends such integers by
      default. Every router reads integers. Not all routers read bytes, and routers that read bytes shorten
      them differently.
    - A block whose tokens are not known is announced by its hash alone, without tokens and with block size 0,
      as vLLM announces blocks that it offloads. A router that knows the block takes such an event as the move
      of the block to another tier. Other routers skip the event. So no router is told a wrong prefix.
    - The first event of each messenger process is `AllBlocksCleared`: batch numbers restart at 0, and
      followers must forget all earlier events.
    - A replay from a number before the oldest kept batch begins with that batch, and the batches' numbers
      show it. There is no snapshot in this format.
    """

    def __init__(
        self,
        events: EventLog,
        *,
        clock: Callable[[], float],
        endpoint: str,
        replay_endpoint: str,
        topic: str = "",
        flush_interval_s: float = FLUSH_INTERVAL_S,
    ) -> None:
        context = zmq.asyncio.Context.instance()
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        pub.maxmsgsize = router.maxmsgsize = MAX_REQUEST_BYTES
        self._peers = [OpenPeers(pub), OpenPeers(router)]
        super().__init__(events, pub, router, endpoint, replay_endpoint, flush_interval_s)
        self._clock = clock
        self._topic = topic.encode()
        self._published: deque[tuple[EventBatch, float]] = deque(maxlen=events.capacity_batches)
        """The last batches, and when each was sent."""

    def close(self) -> None:
        for peers in self._peers:
            peers.close()
        super().close()

    def _frames(self, batch: EventBatch) -> list[bytes]:
        self._published.append((batch, self._clock()))
        return self._encoded(*self._published[-1])

    def _encoded(self, batch: EventBatch, ts: float) -> list[bytes]:
        payload = _encode(_EventBatch(ts, list(_vllm_events(batch))))
        return [self._topic, batch.sequence.to_bytes(8, "big"), payload]

    def _answer(self, request: list[bytes]) -> Iterator[list[bytes]] | None:
        """Return the answers to a replay request; None for a malformed request.

        A REQ socket puts an empty frame before its request, and needs an empty frame before the answer.
        """
        *envelope, start = request or [b""]
        if len(start) != 8 or envelope not in ([], [b""]):
            return None
        return self._replay(envelope, int.from_bytes(start, "big"))

    def _replay(self, envelope: list[bytes], from_sequence: int) -> Iterator[list[bytes]]:
        for batch, ts in list(self._published):
            if batch.sequence >= from_sequence:
                yield [*envelope, *self._encoded(batch, ts)]
        yield [*envelope, b"", END_OF_REPLAY, b""]


def _vllm_events(batch: EventBatch) -> Iterator[_BlockStored | _BlockRemoved | _AllBlocksCleared]:
    for event in batch.events:
        match event:
            case KVStored(tier, keys):
                yield from _blocks_stored(MEDIA[tier], list(dict.fromkeys(keys)), batch.tokens)
            case KVRemoved(tier, keys):
                yield _BlockRemoved(_hashes(keys), MEDIA[tier])
            case KVCleared():
                yield _AllBlocksCleared()


def _blocks_stored(
    medium: str, keys: list[BlockKey], tokens: dict[BlockKey, BlockTokens]
) -> Iterator[_BlockStored]:
    for run in _runs([key for key in keys if key in tokens], tokens):
        first = tokens[run[0]]
        token_ids = [token_id for key in run for token_id in tokens[key].token_ids]
        parent = None if first.parent is None else _hashes([first.parent])[0]
        yield _BlockStored(_hashes(run), parent, token_ids, len(first.token_ids), medium)
    if unknown := [key for key in keys if key not in tokens]:
        yield _BlockStored(_hashes(unknown), None, [], 0, medium)


def _runs(keys: Sequence[BlockKey], tokens: dict[BlockKey, BlockTokens]) -> Iterator[list[BlockKey]]:
    """Yield runs of `keys` in which each block follows the previous block.

    A run comes after the run that has its parent: routers drop a block whose parent they do not know, and
    blocks may be sealed in any order.
    """
    children: dict[BlockKey | None, list[BlockKey]] = {}
    for key in keys:
        children.setdefault(tokens[key].parent, []).append(key)
    present = set(keys)
    pending = [key for key in reversed(keys) if tokens[key].parent not in present]
    while pending:
        run = [pending.pop()]
        while len(followers := children.get(run[-1], [])) == 1:
            run += followers
        pending += reversed(followers)
        yield run


def _hashes(keys: Iterable[BlockKey]) -> list[int]:
    return [int.from_bytes(key[-_HASH_BYTES:], "big") for key in keys]
