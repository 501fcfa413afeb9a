"""What came of one request, as its user saw it, and of all requests of a run.

Owns: the records, and TBT's definition. Does not know: HTTP, and what the outcomes of many mean together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from mooncake.messages.costs import TBT_SHARE


class Kind(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    """429: the server has no room"""
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """Request that ran when the run was ended."""


class Outcome(msgspec.Struct, frozen=True):
    """Times are in seconds from when the request was to be sent, whenever it really was: a client that is
    late makes nobody's latency look better. Tokens without `num_prompt_tokens` were not reported by the
    server."""

    number: int
    kind: Kind
    scheduled_s: float
    """Seconds since the run's beginning."""
    num_input_tokens: int
    """Tokens of the planned prompt."""
    lag_s: float
    """Seconds by which the request was sent late."""
    answered_s: float
    """Seconds to the end of the answer, of whatever kind."""
    ttft_s: float | None = None
    tbt_s: float | None = None
    """TBT of the answer (`tbt_of`); None for less than two tokens."""
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    error: str = ""


def tbt_of(gaps_s: Sequence[float]) -> float | None:
    """Return a request's TBT: the mean of its longest 10% of token gaps, at least one (Mooncake, FAST'25)."""
    if not gaps_s:
        return None
    longest = sorted(gaps_s, reverse=True)[: math.ceil(TBT_SHARE * len(gaps_s))]
    return sum(longest) / len(longest)


@dataclass
class RunResult:
    """The outcomes of one run, or of several together (`add`)."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_sent: int = 0
    wall_s: float = 0.0
    """Seconds to the last outcome."""
    sending_s: float = 0.0
    """Seconds in which requests were sent: the schedule of an open loop, else all of `wall_s`."""
    cpu_shares: list[float] = field(default_factory=list)
    """Processor time by wall time of each client process."""
    num_too_long: int = 0
    """Requests that the server's context does not hold."""
    was_interrupted: bool = False

    def add(self, other: "RunResult") -> None:
        """Another run of the same load, by as many processes."""
        self.outcomes += other.outcomes
        self.num_sent += other.num_sent
        self.wall_s += other.wall_s
        self.sending_s += other.sending_s
        pairs = zip(self.cpu_shares or other.cpu_shares, other.cpu_shares, strict=True)
        self.cpu_shares = [max(pair) for pair in pairs]
        self.num_too_long += other.num_too_long
        self.was_interrupted |= other.was_interrupted
