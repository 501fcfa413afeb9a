"""Sockets by which the KV events of one instance's pool reach its followers, in any format.

A publisher reads the pool's `EventLog` at its own position, and has two sockets:

- PUB sends every batch. The first event is sent at once, and later events every `flush_interval_s` seconds. A
  subscriber that is slow or gone loses batches, and sees that in the batches' numbers. It delays nobody.
- ROUTER answers with replays and snapshots. An answer waits for a peer that reads slowly, and is given up if
  the peer reads nothing. The queue for each peer is bounded.

Owns: these sockets, flow control. Does not know: the format of a message, the pool.
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

import zmq
import zmq.asyncio

from kvstore.events.batches import EventBatch, EventLog
from mooncake.doubling import Doubling
from mooncake.endpoints import listen
from mooncake.errors import ConfigError

FLUSH_INTERVAL_S = 0.01
"""Seconds between two batches, in which further events are collected."""
PUB_QUEUE_LEN = 1_000
"""The most batches that may wait for a subscriber. They have the events of 10 s or more."""
ANSWER_QUEUE_LEN = 32
"""The most messages of an answer that may wait for its peer: 12 MB of a snapshot."""
MAX_ANSWERS = 16
"""The most peers that are answered at the same time; further peers wait."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds for which a peer may read nothing before its answer is given up."""
LOGGED_CHARS = 200
"""The most characters of a malformed request that are logged."""

log = logging.getLogger(__name__)


class Publisher(ABC):
    """The sockets and tasks of a publisher. The sockets are bound on creation.

    Raises ConfigError if an endpoint cannot be bound.
    """

    def __init__(
        self,
        events: EventLog,
        pub: zmq.asyncio.Socket,
        router: zmq.asyncio.Socket,
        endpoint: str,
        request_endpoint: str,
        flush_interval_s: float,
    ) -> None:
        """Bind `pub` to `endpoint` and `router` to `request_endpoint`.

        `flush_interval_s`: seconds between two batches.
        """
        self._events = events
        self._flush_interval_s = flush_interval_s
        self._position = events.oldest_sequence
        """Number of the next batch to send."""
        self._woken = asyncio.Event()
        self._answers: dict[bytes, asyncio.Task[None]] = {}
        """Answers in flight, by peer."""
        self._num_malformed, self._warnings = 0, Doubling(1)
        self._pub, self._router = pub, router
        self._pub.sndhwm = PUB_QUEUE_LEN
        self._router.router_mandatory = True  # else messages beyond a peer's queue are lost silently
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
        self._woken.set()  # for batches that are in the log already

    async def run(self) -> None:
        """Publish and answer until cancelled, then close."""
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
    def _frames(self, batch: EventBatch) -> list[bytes]:
        """Return the frames of `batch` for the PUB socket. Called once for each batch, in order."""

    @abstractmethod
    def _answer(self, request: list[bytes]) -> Iterator[list[bytes]] | None:
        """Return the messages that answer `request`, each as its frames; None for a malformed request."""

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
        if self._warnings.is_due(self._num_malformed):
            text = str([frame[:LOGGED_CHARS] for frame in request[:4]])[:LOGGED_CHARS]
            log.warning(
                "ignored %d malformed requests so far on %s, the last one: %s",
                self._num_malformed,
                self.request_endpoint,
                text,
            )

    async def _send_answer(self, peer: bytes, messages: Iterator[list[bytes]]) -> None:
        try:
            async with asyncio.timeout(None) as timeout:
                for frames in messages:
                    timeout.reschedule(asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S)
                    await self._send([peer, *frames])
        except TimeoutError:
            log.warning("gave up an answer on %s: %r does not read it", self.request_endpoint, peer)
        except zmq.ZMQError as error:
            log.info("gave up an answer on %s: %s", self.request_endpoint, error.strerror)
        finally:
            if self._answers.get(peer) is asyncio.current_task():
                del self._answers[peer]

    async def _send(self, frames: list[bytes]) -> None:
        """Send a message to a peer, waiting for room in its queue. Raises ZMQError if the peer is gone."""
        for attempt in itertools.count():
            # A ROUTER does not tell when a peer's queue has room again. The first wait only lets others run.
            await asyncio.sleep(min(0.001 * attempt, 0.05))
            try:
                await self._router.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                continue
            return


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Bind `socket`. Returns the endpoint with the actual port."""
    try:
        return listen(socket, endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {endpoint} for KV events: {error.strerror}; give each instance its own"
        ) from None
