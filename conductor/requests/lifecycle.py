"""A request's life as the Conductor sees it: its states and the ways between them.

    WAITING ──> RESERVING ──> PREFILLING ──> DECODING ──> FINISHED
     ^ ^            │ └───────────┼─ (inlined) ─^ │
     │ └────────────┴─ (again) ───┴───────────────┘        ABORTED, FAILED from any state that is not an end
     └─ INTERRUPTED <─ (again, its answer may have begun) ─┘

Invariant: every accepted request reaches exactly one of the three ends, once.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from mooncake.messages.requests import Ref, Request


class RequestState(Enum):
    """Where a request is. The last three are ends."""

    WAITING = auto()  # for a pair of instances
    INTERRUPTED = auto()  # the front was asked how far the answer has come
    RESERVING = auto()  # decode was asked for pages
    PREFILLING = auto()  # prefill computes, KVCache streams to decode
    DECODING = auto()  # tokens leave
    FINISHED = auto()
    ABORTED = auto()
    FAILED = auto()

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python


_CUT_SHORT = frozenset({RequestState.ABORTED, RequestState.FAILED})
_ENDS = _CUT_SHORT | {RequestState.FINISHED}
NOT_PLACED = frozenset({RequestState.WAITING, RequestState.INTERRUPTED})
RUNNING_STATES = tuple(state for state in RequestState if state not in _ENDS)
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RESERVING}),
    RequestState.INTERRUPTED: frozenset({RequestState.WAITING}),
    RequestState.RESERVING: frozenset(
        {RequestState.PREFILLING, RequestState.DECODING, RequestState.WAITING, RequestState.INTERRUPTED}
    ),
    RequestState.PREFILLING: frozenset(
        {RequestState.DECODING, RequestState.WAITING, RequestState.INTERRUPTED}
    ),
    RequestState.DECODING: frozenset({RequestState.FINISHED, RequestState.WAITING, RequestState.INTERRUPTED}),
}
_ALLOWED = {state: frozenset() if state in _ENDS else _NEXT[state] | _CUT_SHORT for state in RequestState}


@dataclass(slots=True)
class TrackedRequest:
    """An accepted request. `prefill` and `decode` name its pair from RESERVING on.

    `ref` names the current attempt: each placement is another one, and a message about an earlier one is late
    and is dropped. `refused_by` names the decode instances that have refused it since it last failed.
    """

    request: Request
    front: bytes
    ref: Ref
    submitted_s: float
    waiting_since_s: float
    state: RequestState = RequestState.WAITING
    lives: tuple[bytes, ...] = ()
    """the identities of its pair"""
    failures: list[tuple[bytes, ...]] = field(default_factory=list)
    """attempts that failed, each with the lives of its pair; not those that a loss of one of them explains"""
    refused_by: set[str] = field(default_factory=set)
    is_promised: bool = False
    """it has lost its instances: no prediction may reject it any more"""
    may_have_begun: bool = False
    """tokens of it may have left: nobody may refuse it any more"""
    prefill: str | None = None
    decode: str | None = None
    last_failure: str = field(default="")
    num_unlisted: int = 0
    """heartbeats of its front, in a row, that did not name it"""

    @property
    def request_id(self) -> str:
        """Of the request."""
        return self.request.request_id

    @property
    def must_meet_slos(self) -> bool:
        """Whether it may be rejected, or displaced. Whom one decode instance has refused gets another."""
        return not (self.is_promised or self.may_have_begun or self.refused_by)

    @property
    def why_it_waits(self) -> str:
        """Behind a message: the last failure, if there was one."""
        return f" ({self.last_failure})" if self.last_failure else ""

    def begin_attempt(self) -> None:
        """It is placed, or placed again."""
        self.ref = Ref(self.ref.epoch, self.ref.request_id, self.ref.attempt + 1)

    def move_to(self, state: RequestState) -> None:
        """Change state along the table above."""
        is_allowed = state in _ALLOWED[self.state]
        assert is_allowed, f"{self.request.request_id}: {self.state.name} -> {state.name}"
        self.state = state
