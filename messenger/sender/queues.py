"""Queues of requests to one messenger, and the choice of lanes for them: latency before bulk.

A frame that has been sent cannot be overtaken. So little bulk is in flight while latency requests are
expected, and one of several lanes is kept free of bulk.

Owns: the queues and windows of both classes. Does not know: the clock, timers, what is done with a request.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from messenger.sender.outlet import BulkPace
from messenger.sender.requests import FetchRequest, LaneRequest, Urgency
from messenger.transport.transports import Path
from messenger.wire.protocol import MAX_FRAME_BYTES

BULK_WAITS_S = 0.01
"""Seconds between two pieces of bulk while latency requests are pending."""
BULK_LETS_BY_S = 0.1
"""Seconds without bulk after which a piece of bulk goes before queued latency requests.

Without this limit bulk could starve.
"""
_WINDOW_BYTES = 8 << 20
"""A lane takes no further request of a class while this many bytes of the class are in flight on the lane."""
_LATENCY_EXPECTED_S = 1.0
"""Seconds after a latency request for which a further latency request is expected."""


class Carrier(Protocol):
    """The interface of a lane, for the queues."""

    path: Path

    @property
    def bulk_pace(self) -> BulkPace:
        """The limit of bulk in flight on the lane while latency requests are expected."""

    @property
    def has_capacity(self) -> bool:
        """Whether the lane may have more requests in flight, however small."""

    def outstanding_bytes_of(self, urgency: Urgency) -> int:
        """Return the bytes of this class that are in flight on the lane."""

    @property
    def outstanding_bytes(self) -> int:
        """The bytes of both classes in flight on the lane."""


CarrierT = TypeVar("CarrierT", bound=Carrier)


class Queues(Generic[CarrierT]):
    """The queues of one peer's requests. Callers pass the time."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, deque[LaneRequest]] = {urgency: deque() for urgency in Urgency}
        self._lanes: Sequence[CarrierT] = []
        self._has_main = False
        """Whether a lane is up that is not on a standby path."""
        self._kept_free: CarrierT | None = None
        """The lane that carries no bulk while latency requests are expected; None with only one lane."""
        self._latency_until_s = 0.0
        self._num_latency = 0
        """Pending latency requests: in flight or queued."""
        self._bulk_sent_s = 0.0

    def set_lanes(self, lanes: Sequence[CarrierT]) -> None:
        """Set the lanes that are up.

        Lanes of standby paths take nothing from the queues while lanes of other paths are up.
        """
        self._has_main = any(not lane.path.is_standby for lane in lanes)
        self._lanes = [lane for lane in lanes if not self._is_standby(lane)]
        self._kept_free = self._lanes[0] if len(self._lanes) > 1 else None

    @property
    def has_any(self) -> bool:
        """Whether any request waits."""
        return any(self._queues.values())

    @property
    def has_bulk(self) -> bool:
        """Whether bulk waits."""
        return bool(self._queues[Urgency.BULK])

    def frame_bytes(self, urgency: Urgency, now_s: float) -> int:
        """Return how many bytes to request at once.

        For bulk the number is small while latency requests are expected, so that these are not held up.
        """
        if urgency is Urgency.LATENCY or not self._lanes or now_s >= self._latency_until_s:
            return MAX_FRAME_BYTES
        return min(lane.bulk_pace.piece_bytes for lane in self._lanes)

    def begun(self, request: LaneRequest, now_s: float) -> None:
        """Count a request as pending until `ended` is called."""
        if request.urgency is Urgency.LATENCY:
            self._num_latency += 1
            self._latency_until_s = now_s + _LATENCY_EXPECTED_S
        elif not self._queues[Urgency.BULK]:
            self._bulk_sent_s = max(self._bulk_sent_s, now_s - BULK_WAITS_S)  # no bulk has waited since then

    def ended(self, request: LaneRequest) -> None:
        if request.urgency is Urgency.LATENCY:
            self._num_latency -= 1

    def put(self, request: LaneRequest) -> None:
        self._queues[request.urgency].append(request)

    def put_back(self, request: LaneRequest) -> None:
        """Insert a request before all other requests of its class."""
        self._queues[request.urgency].appendleft(request)

    def remove(self, request: LaneRequest) -> bool:
        """Remove a request. Returns whether it was still queued."""
        queue = self._queues[request.urgency]
        if request not in queue:
            return False
        queue.remove(request)
        return True

    def take_all(self) -> list[LaneRequest]:
        """Remove and return all queued requests."""
        requests = [request for queue in self._queues.values() for request in queue]
        for queue in self._queues.values():
            queue.clear()
        return requests

    def take(self, lane: CarrierT, now_s: float) -> LaneRequest | None:
        """Remove and return the request that `lane` should send now; None if there is no such request."""
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

    def lane_for(self, urgency: Urgency, now_s: float) -> CarrierT | None:
        """Return the lane that should take the next request of this class; None without request or lane.

        It is the lane with the fewest bytes in flight among the lanes that may take the request.
        """
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

    def _may_take(self, lane: CarrierT, urgency: Urgency, now_s: float) -> bool:
        """Return whether `lane` may take the next request of this class, which must exist."""
        if self._is_standby(lane) or not lane.has_capacity:
            return False
        in_flight_bytes = lane.outstanding_bytes_of(urgency)
        if urgency is Urgency.LATENCY or now_s >= self._latency_until_s:
            return in_flight_bytes < _WINDOW_BYTES
        if self._num_latency and now_s < self._bulk_sent_s + BULK_WAITS_S:
            return False
        pace, is_fetch = lane.bulk_pace, isinstance(self._queues[urgency][0], FetchRequest)
        window_bytes = pace.piece_bytes * (pace.num_fetches if is_fetch else pace.num_writes)
        return lane is not self._kept_free and in_flight_bytes < window_bytes

    def _is_standby(self, lane: CarrierT) -> bool:
        return self._has_main and lane.path.is_standby
