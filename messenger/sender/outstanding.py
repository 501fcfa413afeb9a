"""The requests of a lane that have begun and have not been answered.

Writes are answered in order, and so are fetches. Each answer has a deadline.

Owns: these requests, the deadlines of their answers. Does not know: connections.
"""

from collections import deque
from collections.abc import Callable

from messenger.sender.requests import FetchRequest, LaneRequest, ProbeRequest, Urgency, WriteRequest
from messenger.transport.deadline import Deadline
from messenger.wire.messages import Close

_MOST_CLOSES = 1024
"""The most `Close` messages that are remembered until a later request is answered."""


class Outstanding:
    """The requests in flight on one lane. `missed` is called when an answer is late."""

    def __init__(self, answer_timeout_s: float, missed: Callable[[], None]) -> None:
        self.num_bytes = dict.fromkeys(Urgency, 0)
        """Bytes in flight, by class."""
        self.num_begun = self.num_answered = 0
        self.writes: deque[WriteRequest | ProbeRequest] = deque()
        """Writes and probes in flight, the oldest first."""
        self.fetches: deque[FetchRequest] = deque()
        self._write_deadline = Deadline(answer_timeout_s, missed)
        """Deadline of the answer to the oldest of `writes`."""
        self._fetch_deadline = Deadline(answer_timeout_s, missed)
        """Deadline of the answer to the oldest of `fetches`, which may take longer than writes."""
        self._closes: deque[tuple[int, Close]] = deque(maxlen=_MOST_CLOSES)
        """The `Close` messages that may not have arrived, each with the number of requests begun before."""

    def begin(self, request: LaneRequest) -> None:
        self.num_bytes[request.urgency] += request.moving_bytes
        self.num_begun += 1

    def give_up(self, request: LaneRequest) -> None:
        """Remove a request that was not sent."""
        self.num_bytes[request.urgency] -= request.moving_bytes
        self.num_begun -= 1

    def sent(self, request: LaneRequest) -> None:
        """Start to await the answer to `request`."""
        if isinstance(request, FetchRequest):
            self.fetches.append(request)
            if len(self.fetches) == 1:
                self._fetch_deadline.set()
        else:
            self.writes.append(request)
            if len(self.writes) == 1:
                self._write_deadline.set()

    def take_write(self) -> WriteRequest | ProbeRequest:
        """Remove and return the oldest write or probe, which has been answered."""
        request = self.writes.popleft()
        self._answered(request, self._write_deadline, has_more=bool(self.writes))
        return request

    def take_fetch(self) -> FetchRequest:
        """Remove and return the oldest fetch, which has been answered."""
        request = self.fetches.popleft()
        self._answered(request, self._fetch_deadline, has_more=bool(self.fetches))
        return request

    def _answered(self, request: LaneRequest, deadline: Deadline, *, has_more: bool) -> None:
        self.num_bytes[request.urgency] -= request.moving_bytes
        self.num_answered += 1
        while self._closes and self._closes[0][0] < self.num_answered:
            self._closes.popleft()
        if has_more:
            deadline.set()
        else:
            deadline.clear()

    def take_all(self) -> list[LaneRequest]:
        """Remove and return all unanswered requests of a lost lane.

        Writes and probes come first, then fetches; each kind with the oldest first.
        """
        requests = [*self.writes, *self.fetches]
        self.writes.clear()
        self.fetches.clear()
        self.num_bytes = dict.fromkeys(Urgency, 0)
        return requests

    def closed(self, close: Close) -> None:
        """Record a `Close` that is about to be sent."""
        self._closes.append((self.num_begun, close))

    def take_closes(self) -> list[Close]:
        """Remove and return the `Close` messages that may not have arrived.

        A `Close` has arrived if a later request was answered.
        """
        closes = [close for _, close in self._closes]
        self._closes.clear()
        return closes

    def end(self) -> None:
        """Stop awaiting answers."""
        self._write_deadline.close()
        self._fetch_deadline.close()
