"""The outcome of one request, as its client saw it, and the outcomes of a run.

Owns: the records. Does not know: HTTP, how TBT is defined, the meaning of many outcomes together.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """The ways in which a request ends."""

    FINISHED = "finished"
    REJECTED = "rejected"
    """The server had no room (429)."""
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """The run ended before the request."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one request.

    `answered_s` and `ttft_s` count from the time at which the request was due, even if it was sent late, so
    that a slow client makes no latency look better. `num_prompt_tokens` is None if the server has not
    reported its token counts.
    """

    number: int
    kind: Kind
    scheduled_s: float
    """The time at which the request was due, in seconds since the run's beginning."""
    num_input_tokens: int
    """Tokens of the planned prompt."""
    lag_s: float
    """Seconds by which the request was sent late."""
    answered_s: float
    """Seconds until the answer ended, in whichever way."""
    ttft_s: float | None = None
    tbt_s: float | None = None
    """The TBT of the answer (`mooncake.messages.costs.tbt_s`); None for fewer than two tokens."""
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    error: str = ""


@dataclass
class RunResult:
    """The outcomes of one run, or of several runs that were added up (`add`)."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_sent: int = 0
    wall_s: float = 0.0
    """Seconds from the run's beginning to the last outcome."""
    sending_s: float = 0.0
    """Seconds in which requests were sent.

    For an open loop these are the seconds of its schedule, for a closed loop `wall_s`.
    """
    cpu_shares: list[float] = field(default_factory=list)
    """The processor time of each client process, divided by the wall time."""
    num_too_long: int = 0
    """Requests that were left out because they exceed the server's context."""
    was_interrupted: bool = False

    def add(self, other: "RunResult") -> None:
        """Add the outcomes of another run of the same load, with the same number of processes."""
        self.outcomes += other.outcomes
        self.num_sent += other.num_sent
        self.wall_s += other.wall_s
        self.sending_s += other.sending_s
        pairs = zip(self.cpu_shares or other.cpu_shares, other.cpu_shares, strict=True)
        self.cpu_shares = [max(pair) for pair in pairs]
        self.num_too_long += other.num_too_long
        self.was_interrupted |= other.was_interrupted
