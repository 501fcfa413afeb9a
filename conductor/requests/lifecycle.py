"""The life of a request for the Conductor: its states, the allowed changes of state, and its record.

    WAITING ──> RESERVING ──> PREFILLING ──> DECODING ──> FINISHED
     │               ^
     └> QUEUED ──────┘

    RESUMING ──> PREFILLING, DECODING      (its instances have gone on with the request)
             ──> WAITING, INTERRUPTED      (its instances have not)
    RESERVING, PREFILLING           ──> WAITING (retry, preemption, drain)
    DECODING                        ──> WAITING (refusal in the double check)
    RESERVING, PREFILLING, DECODING ──> INTERRUPTED ──> WAITING (retry; the output may have begun)
    every state that is not an end  ──> ABORTED, REJECTED, REFUSED, FAILED

A request is *accepted* when the registry takes it up (`Requests.accept`), before it has a pair, and before
predictions are checked. Invariant: every accepted request reaches exactly one of the five ends, once.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from conductor.requests.migration import Migration
from conductor.settings import SLOs
from conductor.view.assignments import Assignment
from mooncake.messages.requests import Ref, Request


class RequestState(Enum):
    """The states of a request. The last five are ends.

    A request ends as REFUSED if it asks for a feature that its instance does not serve. A refusal in the
    double check of the TBT SLO (`DecodeRefused`, which answers `Decode` and so comes in DECODING) is no end:
    the request is WAITING again, and the decode instance is added to `TrackedRequest.refused_by`.

    A request ends as FAILED if its attempts are used up or a failure is not retryable, if it has proved to be
    the cause of lost instances (`Suspicion`), if no pair came back in time or none is large enough any more,
    or if its front is lost.
    """

    RESUMING = auto()  # an earlier Conductor had the request; its instances may report that they go on
    WAITING = auto()  # no pair has room for it, none is registered, or it is a suspect that awaits reports
    QUEUED = auto()  # in the admission queue, for load to fall or for a pair with room
    INTERRUPTED = auto()  # its front was asked how far its output has come
    RESERVING = auto()  # the decode instance was asked for pages
    PREFILLING = auto()  # the prefill instance computes the prompt, or the decode instance if it inlines it
    DECODING = auto()  # prefill has ended; the decode instance computes the answer
    FINISHED = auto()
    ABORTED = auto()  # its client has left, or its front does not know it any more
    REJECTED = auto()  # rejected before its client has got anything
    REFUSED = auto()  # its instance does not serve a feature that the request asks for
    FAILED = auto()  # it cannot be finished

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
    """The registry's record of a request that is accepted, or about to be.

    Only `conductor.requests.registry` makes records, changes their state, and gives or takes their pairs.
    `Placer`, `WorkerReports`, `Migrations` and `Conductor` set other fields: what protects a request, its
    failures and refusals, the counts of its tokens and of its front's heartbeats.

    Three fields protect a request. The table says which checks still apply, and how the request ends if it
    gets no pair:

        field set           admission checks    double check    too large    no pair in time
        none                yes                 yes             REJECTED     REJECTED
        `refused_by`        no                  yes             REJECTED     REJECTED
        `is_promised`       no                  no              FAILED       REJECTED
        `may_have_begun`    no                  no              FAILED       FAILED

    - Admission checks (`may_be_rejected`): the request is rejected if a prediction misses an SLO or a queue
      is full, and another request may preempt it.
    - Double check (`may_be_refused`), when the prefill has ended: with policy `baseline` the Conductor
      rejects the request. With the other policies the decode instance refuses it, and the request is placed
      on another decode instance, waits in the admission queue, or is rejected. If `is_promised` was set
      after the attempt's `Reserve`, the instance may still refuse this attempt; the request is placed again.
    - Too large: no registered pair is large enough for the request.
    - No pair in time: no pair had room within `placement_timeout_s`. While a role has no instance at all, a
      request whose output cannot have begun does not wait for so long.

    If several fields are set, the lowest row applies. Apart from the table, a failure can end any request as
    FAILED, as the loss of its front does; its client can end it as ABORTED.
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
    """The pair, and the load that the request adds to the pair; None unless `state` is in `PLACED`."""
    failures: list[tuple[bytes, ...]] = field(default_factory=list)
    """The socket identities of the pair of each failed attempt.

    An attempt is left out if an instance of its pair was lost, before the failure or later.
    """
    refused_by: set[str] = field(default_factory=set)
    """The decode instances that have refused the request.

    The set is emptied when another attempt follows a failure or a loss, and when the request is queued
    because no other decode instance is left.
    """
    is_promised: bool = False
    """Whether no prediction may reject the request any more.

    True after an attempt has failed, if an instance of the request began to drain or to switch its role
    before any of the prompt was computed, and if an earlier Conductor accepted the request.
    """
    may_have_begun: bool = False
    """Whether the front may have output tokens of the request. If so, no instance may refuse later attempts.

    The flag is set before the first token: when the Conductor orders decode, or begins the prefill of an
    inlined prompt. The flag is reset if the decode instance refuses the attempt in the double check, as no
    token has left then.
    """
    last_failure: str = ""
    num_attempts: int = 0
    """The number of attempts so far, including attempts at destinations of migrations."""
    migration: Migration | None = None
    """The migration in progress; None without one. Only a DECODING request has one."""
    refused_moves: dict[bytes, float] = field(default_factory=dict)
    """The time of the latest migration that was refused or too late, by the destination's socket identity."""
    num_charged_tokens: int = 0
    """Tokens charged to the tenant's quota when the request was accepted."""
    num_announced: int = 0
    """The number of announced choices of the request's answer that have not been submitted yet.

    Such a choice is accepted without a check of the limit of running requests.
    """
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
        """The last failure, as the end of an error message; empty if there was none."""
        return f" ({self.last_failure})" if self.last_failure else ""

    def new_ref(self, epoch: int) -> Ref:
        """Return the name of a new attempt, under the Conductor of this epoch."""
        self.num_attempts += 1
        return Ref(epoch, self.request_id, self.num_attempts)

    def time_left_s(self, now_s: float) -> float | None:
        """Return the seconds until the first token is due, below 0 if it is late; None without a TTFT SLO."""
        return None if self.slos.ttft_s is None else self.submitted_s + self.slos.ttft_s - now_s

    def is_late(self, first_token_s: float) -> bool:
        """Return whether a first token at this time would miss the TTFT SLO."""
        return self.slos.ttft_s is not None and first_token_s > self.submitted_s + self.slos.ttft_s

    def move_to(self, state: RequestState) -> None:
        """Change the state. The module's docstring lists the allowed changes."""
        is_allowed = state in _ALLOWED[self.state]
        assert is_allowed, f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state
