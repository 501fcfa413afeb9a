"""The requests of a front that are in flight, and what happens if their messages or tokens are lost.

A message of the Conductor may be lost with its connection, and tokens with an instance. So the front counts
the heartbeats at which a request misses something. After too many, it asks for the request again, or ends it.

Owns: the requests in flight. Does not know: connections, the clock, which tokens are new (`reception`).
"""

from collections.abc import Callable, Iterable, Iterator

from conductor.front.errors import UnavailableError
from conductor.front.generation.reception import Lost, Receive, Reception
from mooncake.errors import RequestError
from mooncake.messages.fronts import Accepted, Continue, Resume, TokenOutput
from mooncake.messages.requests import Request

MAX_BEATS_FOR_LAST_TOKENS = 3
"""The number of heartbeats for which the missing tokens of a request are awaited.

They count from the Conductor's report that all tokens were sent, or that it does not know the request.
"""
MAX_UNACCEPTED_BEATS = 1
"""The most heartbeats for which an `Accepted` is awaited. At the next one it counts as lost.

At the first heartbeat the submission may still be in flight.
"""


class Receptions:
    """The requests in flight.

    Args:
        block_size: Tokens of a block.
        absence_timeout_s: Seconds without a token after which a request fails if the Conductor is gone.
        on_dropped: A callback for each stale output.
    """

    def __init__(
        self, block_size: int, absence_timeout_s: float, on_dropped: Callable[[], None] = lambda: None
    ) -> None:
        self._block_size = block_size
        self._absence_timeout_s = absence_timeout_s
        self._on_dropped = on_dropped
        self._of: dict[str, Reception] = {}

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._of)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests, in the order of their submission."""
        return iter(self._of)

    def get(self, request_id: str) -> Reception | None:
        """Return the reception of a request; None if the request is not in flight."""
        return self._of.get(request_id)

    def add(self, request: Request, receive: Receive, now_s: float, *, awaits_acceptance: bool) -> None:
        """Add a request that is submitted at `now_s`.

        `awaits_acceptance` is whether the further choices of the answer are held back until the Conductor has
        accepted the request.
        """
        self._of[request.request_id] = Reception(request, receive, now_s, awaits_acceptance)

    def remove(self, request_id: str) -> Reception | None:
        """Forget a request, and return its reception; None if it is not in flight."""
        return self._of.pop(request_id, None)

    def end(self, request_id: str, error: RequestError) -> None:
        """End a request with an error. Does nothing if the request is not in flight."""
        if (reception := self.remove(request_id)) is not None:
            reception.receive(Lost(request_id, error))

    def accepted(self, request_id: str) -> None:
        """Let an answer submit its further choices. Does nothing if they are not held back."""
        reception = self._of.get(request_id)
        if reception is not None and reception.awaits_acceptance:
            reception.awaits_acceptance = False
            reception.receive(Accepted(request_id))

    def all_sent(self, request_id: str, num_output_tokens: int) -> None:
        """Record that all tokens of a request were sent, so that missing ones are in flight or lost."""
        if (reception := self._of.get(request_id)) is not None:
            reception.num_sent, reception.num_silent_beats = num_output_tokens, 0

    def unknown(self, request_ids: Iterable[str]) -> None:
        """Record that the Conductor does not know these requests.

        The next heartbeat counts this report: after a break the Conductor answers several heartbeats at once,
        while tokens are still in flight.
        """
        for request_id in request_ids:
            if (reception := self._of.get(request_id)) is not None:
                reception.is_unknown = True

    def resume(self, request_id: str, now_s: float) -> Resume | None:
        """Return the message that reports a request to another Conductor, which knows nothing of the request.

        The last Conductor's report that all tokens were sent is forgotten. Returns None if the request is not
        in flight.
        """
        if (reception := self._of.get(request_id)) is None:
            return None
        reception.num_sent, reception.num_silent_beats = None, 0
        return Resume(self._continued(reception), now_s - reception.submitted_s)

    def continued(self, request_id: str) -> Request | None:
        """Return a request with its output so far; None if the request is not in flight."""
        reception = self._of.get(request_id)
        return None if reception is None else self._continued(reception)

    def _continued(self, reception: Reception) -> Request:
        return reception.request.continued(reception.token_ids, self._block_size)

    def deliver(self, output: TokenOutput, now_s: float) -> None:
        """Pass new tokens to their request. Raises GenerationFailedError as `Reception.accept` does."""
        request_id = output.ref.request_id
        reception = self._of.get(request_id)
        received = None if reception is None else reception.accept(output)
        if reception is None or received is None:
            self._on_dropped()
            return
        self.accepted(request_id)  # tokens may overtake the Conductor's message
        reception.last_s, reception.num_silent_beats = now_s, 0
        for event in received:
            if event.finish_reason is not None:
                del self._of[request_id]
            reception.receive(event)

    def beat(self) -> list[Continue]:
        """Count a heartbeat during which no other Conductor has begun to lead.

        Requests end whose last tokens have been missing for too long, and answers whose `Accepted` seems to
        be lost submit their further choices.

        Returns:
            The messages that ask again for requests whose tokens are missing in the middle.
        """
        asked_for = []
        for request_id, reception in list(self._of.items()):
            if reception.awaits_acceptance:
                reception.num_unaccepted_beats += 1
                if reception.num_unaccepted_beats > MAX_UNACCEPTED_BEATS:
                    self.accepted(request_id)
            if reception.beat():
                asked_for.append(Continue(self._continued(reception), reception.attempt[1]))
            if reception.num_sent is not None or reception.is_unknown:
                reception.is_unknown = False
                reception.num_silent_beats += 1
                if reception.num_silent_beats > MAX_BEATS_FOR_LAST_TOKENS:
                    self.end(request_id, reception.what_is_missing)
        return asked_for

    def conductor_is_gone(self, now_s: float) -> None:
        """End the requests that have had no token for `absence_timeout_s`, as no Conductor answers."""
        oldest_s = now_s - self._absence_timeout_s
        for request_id, reception in list(self._of.items()):
            if reception.last_s < oldest_s:
                self.end(request_id, UnavailableError("the conductor is gone and no tokens arrive"))
