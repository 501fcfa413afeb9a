"""The follower of KV events. It keeps the prefix index up to date with the messengers of all instances.

The follower has two sockets for all messengers: a SUB socket for live batches, and a ROUTER socket for
snapshots and replays. The ROUTER socket connects to the ROUTER socket of each messenger. A messenger that
cannot be reached only costs the hits in its pool.

Owns: these sockets, which messengers are followed. Does not know: placement, the order of events
(`conductor.index.event_stream`).
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from conductor.index.event_stream import EventStream, Step
from conductor.index.prefix_index import PrefixIndex
from conductor.view.instances import Instances
from mooncake.endpoints import connect
from mooncake.messages.kv_events import FromKVEvents
from mooncake.messages.pools import MessengerAddress
from mooncake.security.curve import CURVE_OVERHEAD_BYTES, use_key
from mooncake.security.keys import ClusterKey

TICK_S = 1.0
LARGEST_EVENTS_BYTES = 16 << 20
"""The most bytes of a message of KV events that is accepted.

That is ample: a part of a snapshot has at most 360 KB.
"""
LIVE_QUEUE_LEN = 100
"""The most batches of one messenger that wait in the socket. Batches beyond them are replayed later."""
ANSWER_QUEUE_LEN = 4
"""The most parts of a snapshot that wait in the socket. Beyond them the messenger has to wait."""
MAX_LOADING = 16
"""The most snapshots in flight at the same time. The limit matters when many instances join at once."""
SLOWEST_RECONNECT_MS = 5000
"""The longest backoff in milliseconds between two tries to connect."""
LOGGED_CHARS = 200
"""The most characters of an error that are logged."""

_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Followed:
    """A messenger whose KV events are followed."""

    life: bytes
    """The socket identity of the messenger's instance.

    Each life of an instance has another identity. For a new life the messenger is followed anew, from a
    snapshot.
    """
    address: MessengerAddress
    peer: bytes
    """The messenger's routing id at the ROUTER socket."""
    stream: EventStream


class EventFollower:
    """Applies messengers' KV events to `prefixes`. The constructor needs a running event loop."""

    def __init__(self, prefixes: PrefixIndex, key: ClusterKey) -> None:
        self._prefixes = prefixes
        self._decode = msgspec.msgpack.Decoder(FromKVEvents).decode
        self._followed: dict[str, _Followed] = {}
        """The messengers that are followed, by name."""
        self._is_due = asyncio.Event()
        self._peers = itertools.count(1)
        self._live = self._socket(zmq.SUB, key, LIVE_QUEUE_LEN)
        self._live.subscribe(b"")
        self._answers = self._socket(zmq.ROUTER, key, ANSWER_QUEUE_LEN)
        self._answers.router_mandatory = True

    @property
    def streams(self) -> Mapping[str, EventStream]:
        """The event stream of each followed messenger, by the messenger's name."""
        return {name: followed.stream for name, followed in self._followed.items()}

    def follow(self, instances: Instances) -> None:
        """Follow the messengers of these instances and no others.

        The caller must call it at once after every change of `instances`.
        """
        wanted = {
            shard.messenger.instance: (instance.identity, shard.messenger)
            for instance in instances
            for shard in instance.registration.shards
        }
        for name, followed in list(self._followed.items()):
            if wanted.get(name) != (followed.life, followed.address):
                self._leave(name)
        for name, (life, address) in wanted.items():
            if name not in self._followed and all(address.event_endpoints):
                self._join(name, life, address)

    async def run(self) -> None:
        """Receive events and ask for missing ones until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(self._live))
            tasks.create_task(self._receive(self._answers))
            await self._tick()

    def close(self) -> None:
        """Close both sockets, and drop unsent messages."""
        self._live.close(linger=0)
        self._answers.close(linger=0)

    # -- messengers ------------------------------------------------------------------------------

    def _join(self, name: str, life: bytes, address: MessengerAddress) -> None:
        live, requests = address.event_endpoints
        peer = b"%d" % next(self._peers)  # never reuse an id: libzmq would end the process
        try:
            connect(self._live, live)
            self._answers.setsockopt(zmq.CONNECT_ROUTING_ID, peer)
            connect(self._answers, requests)
        except zmq.ZMQError as error:
            log.warning("cannot follow the KV events of %s at %s, %s: %s", name, live, requests, error)
            self._disconnect(address)
            return
        stream = EventStream(name, address.incarnation)
        self._followed[name] = _Followed(life, address, peer, stream)
        self._is_due.set()

    def _leave(self, name: str) -> None:
        self._disconnect(self._followed.pop(name).address)

    def _disconnect(self, address: MessengerAddress) -> None:
        live, requests = address.event_endpoints
        with contextlib.suppress(zmq.ZMQError):  # it was not connected
            self._live.disconnect(live)
        with contextlib.suppress(zmq.ZMQError):
            self._answers.disconnect(requests)

    def _socket(self, kind: int, key: ClusterKey, queue_len: int) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(kind)
        use_key(socket, key)
        socket.linger = 0
        socket.set_hwm(queue_len)
        socket.maxmsgsize = LARGEST_EVENTS_BYTES + CURVE_OVERHEAD_BYTES
        socket.reconnect_ivl_max = SLOWEST_RECONNECT_MS
        return socket

    # -- events --------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        """Receive messages of a socket until cancelled.

        The last frame has the message. The frame before it has the topic at the SUB socket, and the peer's id
        at the ROUTER socket.
        """
        while True:
            # Queued messages come without suspending; a burst of them must not starve the event loop.
            await asyncio.sleep(0)
            payload = (await socket.recv_multipart())[-1]
            try:
                message: FromKVEvents = self._decode(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                reason = str(error)[:LOGGED_CHARS]
                log.warning("dropped malformed KV events of %d bytes: %s", len(payload), reason)
                continue
            followed = self._followed.get(message.instance)
            if followed is None:
                continue
            had_none = followed.stream.needs_snapshot
            await self._carry_out(followed, followed.stream.receive(message, time.monotonic()))
            if had_none and not followed.stream.needs_snapshot:
                self._is_due.set()  # the next messenger may load its snapshot

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._is_due.wait()
            self._is_due.clear()
            now_s = time.monotonic()
            num_loading = sum(followed.stream.is_loading(now_s) for followed in self._followed.values())
            # A messenger that was asked in vain comes last, so that it does not hold up the others.
            for followed in sorted(self._followed.values(), key=lambda followed: followed.stream.progress_s):
                stream = followed.stream
                if stream.needs_snapshot and not stream.is_loading(now_s):
                    if num_loading >= MAX_LOADING:
                        continue
                    num_loading += 1
                await self._carry_out(followed, stream.tick(now_s))

    async def _carry_out(self, followed: _Followed, step: Step) -> None:
        if step.events:
            self._prefixes.apply(followed.address.instance, step.events)
        if step.ask is None:
            return
        try:
            await self._answers.send_multipart([followed.peer, _encode(step.ask)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The messenger is gone, or does not read: it is asked again later.
            log.debug("cannot ask %s for KV events: %s", followed.address.instance, error.strerror)
