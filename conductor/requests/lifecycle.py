"""A request's life as the Conductor sees it: its states, the ways between them, and all that is known of it.

    WAITING ──> RESERVING ──> PREFILLING ──> DECODING ──> FINISHED
       │         ^
       └> QUEUED ┘

    RESUMING ──> PREFILLING, DECODING (its instances have gone on with it)
             ──> WAITING, INTERRUPTED (they have not)
    RESERVING, PREFILLING, DECODING ──> WAITING (retry)
                                    ──> INTERRUPTED ──> WAITING (retry; the output may have begun)
    every state that is not an end  ──> ABORTED, REJECTED, REFUSED, FAILED

Invariant: every accepted request reaches exactly one of the five ends, once.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from conductor.requests.migration import Migration
from conductor.settings import SLOs
from conductor.view.assignments import Assignment
from mooncake.messages.requests import Ref, Request


class RequestState(Enum):
    """The states of a request. The last five are ends.

    A request is REFUSED if its instance does not serve a thing that it asks for. A decode instance that
    refuses a request in the double check of the TBT SLO (`DecodeRefused`) does not end it: the instance is
    added to `TrackedRequest.refused_by`.
    """

    RESUMING = auto()  # an earlier Conductor had it, and its instances may tell that they still do
    WAITING = auto()  # no pair has room for it, or none is registered
    QUEUED = auto()  # in the admission queue, for load to fall
    INTERRUPTED = auto()  # its front was asked how far its output has come
    RESERVING = auto()  # the decode instance was asked for pages
    PREFILLING = auto()  # the prefill instance computes the prompt, or the decode instance if it inlines it
    DECODING = auto()  # prefill has ended; the decode instance computes the answer
    FINISHED = auto()
    ABORTED = auto()  # its client or front does not want it any more
    REJECTED = auto()  # rejected before its client has got anything
    REFUSED = auto()  # its instance does not serve a thing that it asks for
    FAILED = auto()

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python


PLACED = frozenset({RequestState.RESERVING, RequestState.PREFILLING, RequestState.DECODING})
_CUT_SHORT = frozenset(
    {RequestState.ABORTED, RequestState.REJECTED, RequestState.REFUSED, RequestState.FAILED}
)
_ENDS = _CUT_SHORT | {RequestState.FINISHED}
OPEN_STATES = tuple(state for state in RequestState if state not in _ENDS)
_RETRIES = frozenset({RequestState.WAITING, RequestState.INTERRUPTED})
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RESUMING: _RETRIES | {RequestState.PREFILLING, RequestState.DECODING},
    RequestState.WAITING: frozenset({RequestState.QUEUED, RequestState.RESERVING}),
    RequestState.QUEUED: frozenset({RequestState.RESERVING}),
    RequestState.INTERRUPTED: frozenset({RequestState.WAITING}),
    RequestState.RESERVING: _RETRIES | {RequestState.PREFILLING},
    RequestState.PREFILLING: _RETRIES | {RequestState.DECODING},
    RequestState.DECODING: _RETRIES | {RequestState.FINISHED},
}
_ALLOWED = {state: frozenset() if state in _ENDS else _NEXT[state] | _CUT_SHORT for state in RequestState}


@dataclass(slots=True)
class TrackedRequest:
    """A request as the registry knows it, accepted or about to be.

    Only `conductor.requests.registry` makes it, changes its state, and gives it a pair or takes the pair
    away.

    Three fields protect a request. What may still happen to it:

        field set           admission checks    double check    without a pair
        none                yes                 yes             REJECTED
        `refused_by`        no                  yes             REJECTED
        `is_promised`       no                  no              REJECTED
        `may_have_begun`    no                  no              FAILED

    Admission checks (`may_be_rejected`): the request is rejected because a prediction misses an SLO or a
    queue is full, or another request preempts it.

    Double check (`may_be_refused`): when the prefill has ended, the Conductor rejects the request (policy
    `baseline`), or the decode instance refuses it (the other policies). A refused request is placed on
    another decode instance. If no instance or no time is left for that, and the request cannot wait in the
    admission queue, it is rejected.

    Without a pair: the end of the request if no pair can be expected to have room for it.

    A failure may end the request as FAILED in any row, and its client or front may end it as ABORTED.
    """

    request: Request
    front: bytes
    slos: SLOs
    ref: Ref
    """The name of the current attempt. Each placement and each move makes a new attempt."""
    submitted_s: float
    waiting_since_s: float
    state: RequestState = RequestState.WAITING
    assignment: Assignment | None = None
    """The pair, and the load that the request adds to it; None unless `state` is in `PLACED`."""
    failures: list[tuple[bytes, ...]] = field(default_factory=list)
    """The pair's socket identities in each failed attempt. Attempts that failed because an instance of the
    pair was lost are left out."""
    refused_by: set[str] = field(default_factory=set)
    """The decode instances that have refused the request since it last failed or joined the admission queue
    again."""
    is_promised: bool = False
    """Whether no prediction may reject the request, as an attempt has failed, its instance has drained, or an
    earlier Conductor had accepted it."""
    may_have_begun: bool = False
    """Whether the front may have got output tokens, so that later attempts may not be refused.

    Set before the first token: when the Conductor orders decoding, or begins the prefill of an inlined
    prompt. Reset if the decode instance refuses the attempt in the double check: then no token has left.
    """
    last_failure: str = ""
    num_attempts: int = 0
    """The number of attempts so far, those at destinations of migrations included."""
    migration: Migration | None = None
    """The migration in progress, if `state` is DECODING."""
    refused_moves: dict[bytes, float] = field(default_factory=dict)
    """The time at which each life of an instance last refused the request as the destination of a
    migration."""
    num_charged_tokens: int = 0
    """Tokens charged to the tenant's quota when the request was accepted."""
    num_unlisted: int = 0
    """Consecutive heartbeats of the request's front that did not name the request."""

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def placed(self) -> Assignment:
        """The assignment of a request whose state is in `PLACED`."""
        assert self.assignment is not None
        return self.assignment

    @property
    def prefill(self) -> str | None:
        """The name of the request's prefill instance; None without a pair."""
        return None if self.assignment is None else self.assignment.placement.prefill.name

    @property
    def decode(self) -> str | None:
        """The name of the request's decode instance; None without a pair."""
        return None if self.assignment is None else self.assignment.placement.decode.name

    @property
    def may_be_refused(self) -> bool:
        """Whether an instance may still refuse the request."""
        return not (self.is_promised or self.may_have_begun)

    @property
    def may_be_rejected(self) -> bool:
        """Whether the admission checks may reject the request, and another request may preempt it."""
        return self.may_be_refused and not self.refused_by

    @property
    def why_it_waits(self) -> str:
        """The last failure, phrased as the end of an error message; empty without one."""
        return f" ({self.last_failure})" if self.last_failure else ""

    def new_ref(self, epoch: int) -> Ref:
        """Return the name of a new attempt, under the Conductor of this epoch."""
        self.num_attempts += 1
        return Ref(epoch, self.request_id, self.num_attempts)

    def time_left_s(self, now_s: float) -> float | None:
        """Return the seconds until the first token is due, less than 0 when it is late; None without a TTFT
        SLO."""
        return None if self.slos.ttft_s is None else self.submitted_s + self.slos.ttft_s - now_s

    def is_late(self, first_token_s: float) -> bool:
        """Return whether a first token at this time would miss the TTFT SLO."""
        return self.slos.ttft_s is not None and first_token_s > self.submitted_s + self.slos.ttft_s

    def move_to(self, state: RequestState) -> None:
        """Change the state. The change must be in the table of the module's docstring."""
        is_allowed = state in _ALLOWED[self.state]
        assert is_allowed, f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state
