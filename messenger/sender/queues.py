"""What waits to be sent to one messenger, and which of its lanes may take it: latency goes before bulk.

What is sent cannot be overtaken any more. So little bulk is under way while others are in a hurry, and one of
several lanes is kept free of it.

Owns: the queues and windows of both classes. Does not know: the clock, timers, what is done with a request.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from messenger.sender.requests import FetchRequest, Request, Urgency
from messenger.transport.transports import Path, Transport
from messenger.wire.protocol import MAX_FRAME_BYTES

BULK_WAITS_S = 0.01
"""for those in a hurry, at most: then some of it is sent between them"""
BULK_LETS_BY_S = 0.1
"""all those in a hurry, at most: then some of it goes first, or it would wait for as long as they come"""
_WINDOW_BYTES = 8 << 20
"""of one class under way on one lane"""
_CAUTIOUS_BULK_WINDOW_BYTES = {Transport.TCP: 1 << 20, Transport.RDMA: 1 << 20, Transport.SHM: 2 << 20}
"""of bulk while others are in a hurry, two pieces, over shared memory one of what is fetched: they wait
behind so much"""
_HURRY_S = 1.0
"""after a latency request the next one is expected"""


class Carrier(Protocol):
    """A lane, as it is seen here."""

    path: Path

    @property
    def has_capacity(self) -> bool:
        """Whether it may have more under way, however little."""

    def outstanding_bytes_of(self, urgency: Urgency) -> int:
        """Of requests of this class that are under way on it."""

    @property
    def outstanding_bytes(self) -> int:
        """Of both classes."""


Lane = TypeVar("Lane", bound=Carrier)


class Queues(Generic[Lane]):
    """Of one peer. Whoever asks says what time it is."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, deque[Request]] = {urgency: deque() for urgency in Urgency}
        self._lanes: Sequence[Lane] = []
        self._has_rdma = False
        self._kept_free: Lane | None = None
        """of several lanes, of bulk while others are in a hurry"""
        self._hurry_until_s = 0.0
        self._num_urgent = 0
        """latency requests under way or waiting"""
        self._bulk_sent_s = 0.0

    def set_lanes(self, lanes: Sequence[Lane]) -> None:
        """Those that are up now. TCP stands by where there is RDMA."""
        self._has_rdma = any(lane.path.transport is Transport.RDMA for lane in lanes)
        self._lanes = [lane for lane in lanes if not self._is_standby(lane)]
        self._kept_free = self._lanes[0] if len(self._lanes) > 1 else None

    @property
    def has_rdma(self) -> bool:
        return self._has_rdma

    @property
    def has_any(self) -> bool:
        """Whether some request waits."""
        return any(self._queues.values())

    @property
    def has_bulk(self) -> bool:
        """Whether some waits."""
        return bool(self._queues[Urgency.BULK])

    def frame_bytes(self, urgency: Urgency, now_s: float) -> int:
        """How much should be asked for at once: of bulk little enough for those in a hurry to get past it."""
        if urgency is Urgency.LATENCY or not self._lanes or now_s >= self._hurry_until_s:
            return MAX_FRAME_BYTES
        return min(_CAUTIOUS_BULK_WINDOW_BYTES[lane.path.transport] for lane in self._lanes) // 2

    def begun(self, request: Request, now_s: float) -> None:
        """It is wanted from now on, until `ended`."""
        if request.urgency is Urgency.LATENCY:
            self._num_urgent += 1
            self._hurry_until_s = now_s + _HURRY_S
        elif not self._queues[Urgency.BULK]:
            self._bulk_sent_s = max(self._bulk_sent_s, now_s - BULK_WAITS_S)  # none has waited since then

    def ended(self, request: Request) -> None:
        if request.urgency is Urgency.LATENCY:
            self._num_urgent -= 1

    def put(self, request: Request) -> None:
        self._queues[request.urgency].append(request)

    def put_back(self, request: Request) -> None:
        """Before all others of its class."""
        self._queues[request.urgency].appendleft(request)

    def remove(self, request: Request) -> bool:
        """Whether it was still there."""
        queue = self._queues[request.urgency]
        if request not in queue:
            return False
        queue.remove(request)
        return True

    def take_all(self) -> list[Request]:
        """Nothing waits any more."""
        requests = [request for queue in self._queues.values() for request in queue]
        for queue in self._queues.values():
            queue.clear()
        return requests

    def take(self, lane: Lane, now_s: float) -> Request | None:
        """What `lane` should send now, if there is something for it."""
        bulk = self._queues[Urgency.BULK]
        may_take_bulk = bool(bulk) and self._may_take(lane, Urgency.BULK, now_s)
        is_overdue = may_take_bulk and now_s >= self._bulk_sent_s + BULK_LETS_BY_S
        urgent = self._queues[Urgency.LATENCY]
        if urgent and not is_overdue and self._may_take(lane, Urgency.LATENCY, now_s):
            return urgent.popleft()
        if not may_take_bulk:
            return None
        self._bulk_sent_s = now_s
        return bulk.popleft()

    def lane_for(self, urgency: Urgency, now_s: float) -> Lane | None:
        """The lane with the least under way that may take a request of this class, if both are there."""
        if not self._queues[urgency]:
            return None
        chosen, least_bytes = None, 0
        for lane in self._lanes:
            if self._may_take(lane, urgency, now_s):
                num_bytes = lane.outstanding_bytes
                if chosen is None or num_bytes < least_bytes:
                    chosen, least_bytes = lane, num_bytes
                if not num_bytes:
                    break
        return chosen

    def _may_take(self, lane: Lane, urgency: Urgency, now_s: float) -> bool:
        """Whether `lane` may be given what comes next of this class. Something does."""
        if self._is_standby(lane) or not lane.has_capacity:
            return False
        under_way_bytes = lane.outstanding_bytes_of(urgency)
        if urgency is Urgency.LATENCY or now_s >= self._hurry_until_s:
            return under_way_bytes < _WINDOW_BYTES
        if self._num_urgent and now_s < self._bulk_sent_s + BULK_WAITS_S:
            return False
        window_bytes = _CAUTIOUS_BULK_WINDOW_BYTES[lane.path.transport]
        if lane.path.transport is Transport.SHM and isinstance(self._queues[urgency][0], FetchRequest):
            window_bytes //= 2  # this side copies it, before it can ask for anything else
        return lane is not self._kept_free and under_way_bytes < window_bytes

    def _is_standby(self, lane: Lane) -> bool:
        return self._has_rdma and lane.path.transport is Transport.TCP
