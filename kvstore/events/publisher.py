"""Sends the KV events of one instance's pool to whoever follows it, and answers those who missed some.

`InternalPublisher` speaks to the Conductor (`mooncake.messages.kv_events`); `VllmPublisher` speaks vLLM's
format, so that existing KV-aware routers can follow an instance. Both read the same `EventLog`, each at its
own position, and each has two sockets:

- PUB: every batch, the first event at once, then what `flush_interval_s` has collected. A subscriber that is
  slow or gone loses batches and sees that in their numbers; it never holds up anybody.
- ROUTER: replays and snapshots. An answer waits for a peer that reads slowly and is given up if it reads
  nothing; what may be queued for a peer is bounded.

Owns: these sockets, both wire formats. Does not know: the pool, the clock.
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from kvstore.events.batches import Batch, BlockTokens, EventLog
from kvstore.events.open_peers import OpenPeers
from mooncake.doubling import Doubling
from mooncake.errors import ConfigError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import (
    EventsGone,
    GetSnapshot,
    KVCleared,
    KVEvents,
    KVRemoved,
    KVSnapshot,
    KVStored,
    ReplayDone,
    ReplayEvents,
    ToKVEvents,
)
from mooncake.messages.pools import Tier
from mooncake.security.curve import Gate
from mooncake.security.keys import ClusterKey

Snapshot = Callable[[], Iterable[tuple[Tier, list[BlockKey]]]]
"""What the pool holds now; has to agree with what it reported to the log."""

KV_TOPIC = b"kv"
FLUSH_INTERVAL_S = 0.01
SNAPSHOT_PART_KEYS = 20_000
"""360 KB; a snapshot of a million blocks has 50 parts"""
PUB_QUEUE_LEN = 1_000
"""batches that may wait for a subscriber: 10 s and more"""
ANSWER_QUEUE_LEN = 32
"""messages that may wait for a peer that asked for them: 12 MB of snapshot"""
MAX_ANSWERS = 16
"""peers that are answered at the same time; others wait"""
ANSWER_PATIENCE_S = 10.0
"""how long a peer may read nothing before its answer is given up"""
MAX_REQUEST_BYTES = 1 << 10
"""of a frame from whoever follows vLLM's format: a topic, or a number"""
LOGGED_CHARS = 200

_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger(__name__)


class _Publisher(ABC):
    """The sockets and tasks that both formats share. Binds at once; raises ConfigError if it cannot."""

    def __init__(
        self,
        events: EventLog,
        pub: zmq.asyncio.Socket,
        router: zmq.asyncio.Socket,
        endpoint: str,
        request_endpoint: str,
        flush_interval_s: float,
    ) -> None:
        """`pub` and `router` are to be bound here."""
        self._events = events
        self._flush_interval_s = flush_interval_s
        self._position = events.oldest_sequence
        """number of the next batch to send"""
        self._woken = asyncio.Event()
        self._answers: dict[bytes, asyncio.Task[None]] = {}
        """by peer"""
        self._num_malformed, self._warnings = 0, Doubling(1)
        self._pub, self._router = pub, router
        self._pub.sndhwm = PUB_QUEUE_LEN
        self._router.router_mandatory = True  # else what does not fit into a peer's queue is lost silently
        self._router.router_handover = True
        self._router.sndhwm = ANSWER_QUEUE_LEN
        self._router.rcvhwm = ANSWER_QUEUE_LEN
        try:
            self.endpoint = _bind(self._pub, endpoint)
            self.request_endpoint = _bind(self._router, request_endpoint)
        except ConfigError:
            self.close()
            raise
        events.on_event(self._woken.set)
        self._woken.set()  # for what the log holds already

    async def run(self) -> None:
        """Publishes and answers until cancelled, then closes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                await self._serve(tasks)
        finally:
            self.close()

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)

    @abstractmethod
    def _frames(self, batch: Batch) -> list[bytes]:
        """`batch` as the PUB socket sends it. Called once for each batch, in order."""

    @abstractmethod
    def _answer(self, request: list[bytes]) -> Iterator[list[bytes]] | None:
        """The frames of each message that answers `request`; None if that is malformed."""

    async def _publish(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            self._events.seal()
            first = max(self._position, self._events.oldest_sequence)
            for batch in self._events.since(first) or ():
                await self._pub.send_multipart(self._frames(batch), flags=zmq.NOBLOCK)
                self._position = batch.sequence + 1
            await asyncio.sleep(self._flush_interval_s)

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            # Queued requests come without suspending; a burst of them must not starve the event loop.
            await asyncio.sleep(0)
            while len(self._answers) >= MAX_ANSWERS:
                await asyncio.wait(self._answers.values(), return_when=asyncio.FIRST_COMPLETED)
            peer, *request = await self._router.recv_multipart()
            messages = self._answer(request)
            if messages is None:
                self._ignore(request)
                continue
            if previous := self._answers.get(peer):
                previous.cancel()
            self._answers[peer] = tasks.create_task(self._send_answer(peer, messages))

    def _ignore(self, request: list[bytes]) -> None:
        self._num_malformed += 1
        if self._warnings.has_come(self._num_malformed):
            text = str([frame[:LOGGED_CHARS] for frame in request[:4]])[:LOGGED_CHARS]
            log.warning(
                "ignored %d malformed requests so far on %s, the last one: %s",
                self._num_malformed,
                self.request_endpoint,
                text,
            )

    async def _send_answer(self, peer: bytes, messages: Iterator[list[bytes]]) -> None:
        try:
            async with asyncio.timeout(None) as patience:
                for frames in messages:
                    patience.reschedule(asyncio.get_running_loop().time() + ANSWER_PATIENCE_S)
                    await self._send([peer, *frames])
        except TimeoutError:
            log.warning("gave up an answer on %s: %r does not read it", self.request_endpoint, peer)
        except zmq.ZMQError as error:
            log.info("gave up an answer on %s: %s", self.request_endpoint, error.strerror)
        finally:
            if self._answers.get(peer) is asyncio.current_task():
                del self._answers[peer]

    async def _send(self, frames: list[bytes]) -> None:
        """Raises ZMQError if the peer is gone."""
        for attempt in itertools.count():
            # A ROUTER does not tell when a peer's queue has room again. The first wait only lets others run.
            await asyncio.sleep(min(0.001 * attempt, 0.05))
            try:
                await self._router.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                continue
            return


class InternalPublisher(_Publisher):
    """Batches, replays and snapshots in the messages of `mooncake.messages.kv_events`; the topic is
    `KV_TOPIC`.

    Encrypted, for holders of the cluster's key. Needs a running event loop.
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
        """Connections that were closed because they showed another key, or none."""
        return self._gate.num_refused

    @property
    def num_unfinished(self) -> int:
        """Connections that ended in the middle of their handshake."""
        return self._gate.num_unfinished

    def close(self) -> None:
        self._gate.close()

    def _frames(self, batch: Batch) -> list[bytes]:
        return [KV_TOPIC, self._encoded(batch)]

    def _encoded(self, batch: Batch) -> bytes:
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


# -- vLLM's format ------------------------------------------------------------------------------------

MEDIA = {Tier.DRAM: "CPU", Tier.SSD: "DISK"}
"""vLLM says CPU and, lately, STORAGE; routers that tell tiers apart know DISK, only the newest STORAGE."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    """`lora_id` and `lora_name` have no default in vLLM: strict decoders miss them when they are left out."""

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
    """The rank is always there: some routers cannot read a batch without one."""

    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    data_parallel_rank: int = 0


class VllmPublisher(_Publisher):
    """The same events as vLLM sends them: `[topic, 8-byte number, payload]`, and replays.

    - Open to everybody who reaches the sockets: the routers that follow this format know no keys. How many
      they are, and what they say, is bounded (`OpenPeers`).
    - `topic` is the first frame; some routers want `kv@<address of the instance>@<model>`.
    - `clock` gives the wall-clock time of a batch, in seconds.
    - Hashes are 64-bit integers, the last 8 bytes of a key, as vLLM's are by default: every router reads
      integers; not all read bytes, and those that do shorten them differently.
    - A block whose tokens are not known is announced by its hash alone, without tokens and with block size 0,
      as vLLM announces what it offloads. Routers apply that to a block they have met, which has moved to
      another tier, and skip it otherwise: they are never told a wrong prefix.
    - A life begins with `AllBlocksCleared`: numbers begin anew, and what went before may not hold any more.
    - A replay that starts before the oldest batch begins with that one, and the numbers show it. There is no
      snapshot in this format.
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
        self._published: deque[tuple[Batch, float]] = deque(maxlen=events.capacity_batches)
        """the last batches, and when each was sent"""

    def close(self) -> None:
        for peers in self._peers:
            peers.close()
        super().close()

    def _frames(self, batch: Batch) -> list[bytes]:
        self._published.append((batch, self._clock()))
        return self._encoded(*self._published[-1])

    def _encoded(self, batch: Batch, ts: float) -> list[bytes]:
        payload = _encode(_EventBatch(ts, list(_vllm_events(batch))))
        return [self._topic, batch.sequence.to_bytes(8, "big"), payload]

    def _answer(self, request: list[bytes]) -> Iterator[list[bytes]] | None:
        """A REQ socket puts an empty frame before its request and needs one before the answer."""
        *envelope, start = request or [b""]
        if len(start) != 8 or envelope not in ([], [b""]):
            return None
        return self._replay(envelope, int.from_bytes(start, "big"))

    def _replay(self, envelope: list[bytes], from_sequence: int) -> Iterator[list[bytes]]:
        for batch, ts in list(self._published):
            if batch.sequence >= from_sequence:
                yield [*envelope, *self._encoded(batch, ts)]
        yield [*envelope, b"", END_OF_REPLAY, b""]


def _vllm_events(batch: Batch) -> Iterator[_BlockStored | _BlockRemoved | _AllBlocksCleared]:
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
    """Splits `keys` into runs in which each block follows the one before it. A run comes after its parent's:
    routers drop a block whose parent they have not met, and blocks may be sealed in any order."""
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
    return [int.from_bytes(key[-8:], "big") for key in keys]


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Binds `socket`; returns the endpoint with the port that it got."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {endpoint} for KV events: {error.strerror}; give each instance its own"
        ) from None
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
