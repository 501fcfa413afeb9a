"""Figures of a whole run, computed from its outcomes.

A request is *effective* when it has finished with TTFT and TBT both within their SLOs. Goodput is the number
of effective requests a second (Mooncake, FAST'25).

Owns: goodput, attainment, percentiles, and whether the client was fast enough for valid figures. Does not
know: how outcomes came about, how figures are shown.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.tools.load.outcomes import Kind, Outcome, RunResult

MAX_CPU_SHARE = 0.7
"""The largest share of a core that a client process may take.

If it takes more, the client's own delays are no longer small.
"""
MAX_LAG_S = 0.02
"""The largest acceptable 99th percentile of the seconds by which requests are sent late."""
NUM_ERRORS = 5


class Slo(NamedTuple):
    """The SLOs in seconds. Requests with at least `long_from` input tokens count as long."""

    ttft_s: float
    tbt_s: float
    long_from: int

    def is_met(self, outcome: Outcome) -> bool:
        """Return whether the request was effective."""
        return (
            outcome.kind is Kind.FINISHED
            and outcome.ttft_s is not None
            and outcome.ttft_s <= self.ttft_s
            and (outcome.tbt_s is None or outcome.tbt_s <= self.tbt_s)
        )


class Spread(msgspec.Struct, frozen=True):
    """The spread of one quantity over requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Return the spread of the values that are numbers; None if all values are None."""
        known = np.array([value for value in values if value is not None])
        if not known.size:
            return None
        p50, p90, p99 = map(float, np.percentile(known, [50, 90, 99]))
        return cls(float(known.mean()), p50, p90, p99, float(known.max()))


class ClassSummary(msgspec.Struct, frozen=True):
    """The figures of the short requests or of the long requests."""

    num_requests: int
    num_rejected: int
    attainment: float


class ClientSummary(msgspec.Struct, frozen=True):
    """The load of the client itself.

    If `is_limit`, the client was too slow, and the figures include its own delays.
    """

    num_processes: int
    max_cpu_share: float
    lag_s: Spread | None
    is_limit: bool


class Summary(msgspec.Struct, frozen=True):
    """Figures of one run.

    Rates of requests are numbers divided by the time in which requests were sent (open loop) or by the time
    of the whole run (closed loop). Rates of tokens are always numbers divided by the time of the whole run.
    Requests that were cut off at the end of the run count only in `num_unfinished`.
    """

    num_requests: int
    num_finished: int
    num_rejected: int
    num_failed: int
    num_unfinished: int
    num_too_long: int
    was_interrupted: bool
    duration_s: float
    offered_per_s: float
    goodput_per_s: float
    attainment: float
    """The share of effective requests among all requests."""
    ttft_s: Spread | None
    tbt_s: Spread | None
    e2e_s: Spread | None
    rejected_after_s: Spread | None
    input_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float | None
    """The cached share of the prompt tokens of finished requests; None if the server does not report it."""
    by_class: dict[str, ClassSummary]
    errors: dict[str, int]
    client: ClientSummary


def summarize(result: RunResult, slo: Slo) -> Summary:
    """Return all figures of a run."""
    ended = [outcome for outcome in result.outcomes if outcome.kind is not Kind.UNFINISHED]
    finished = _of_kind(ended, Kind.FINISHED)
    rejected = _of_kind(ended, Kind.REJECTED)
    failed = _of_kind(ended, Kind.FAILED)
    wall_s, sending_s = max(result.wall_s, 1e-9), max(result.sending_s, 1e-9)
    num_effective = sum(map(slo.is_met, ended))
    is_long = {True: "long", False: "short"}
    classes = {
        name: [o for o in ended if (o.num_input_tokens >= slo.long_from) is flag]
        for flag, name in is_long.items()
    }
    return Summary(
        num_requests=len(ended),
        num_finished=len(finished),
        num_rejected=len(rejected),
        num_failed=len(failed),
        num_unfinished=len(result.outcomes) - len(ended),
        num_too_long=result.num_too_long,
        was_interrupted=result.was_interrupted,
        duration_s=wall_s,
        offered_per_s=len(result.outcomes) / sending_s,
        goodput_per_s=num_effective / sending_s,
        attainment=num_effective / max(1, len(ended)),
        ttft_s=Spread.of(outcome.ttft_s for outcome in finished),
        tbt_s=Spread.of(outcome.tbt_s for outcome in finished),
        e2e_s=Spread.of(outcome.answered_s for outcome in finished),
        rejected_after_s=Spread.of(outcome.answered_s for outcome in rejected),
        input_tokens_per_s=sum(o.num_prompt_tokens or o.num_input_tokens for o in finished) / wall_s,
        output_tokens_per_s=sum(outcome.num_output_tokens for outcome in ended) / wall_s,
        cached_share=_cached_share(finished),
        by_class={
            name: ClassSummary(
                len(members),
                len(_of_kind(members, Kind.REJECTED)),
                sum(map(slo.is_met, members)) / len(members),
            )
            for name, members in classes.items()
            if members
        },
        errors=dict(Counter(outcome.error for outcome in failed).most_common(NUM_ERRORS)),
        client=_client(result),
    )


def _of_kind(outcomes: Iterable[Outcome], kind: Kind) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.kind is kind]


def _cached_share(finished: Sequence[Outcome]) -> float | None:
    told = [o for o in finished if o.num_cached_tokens is not None and o.num_prompt_tokens]
    if not told:
        return None
    return sum(o.num_cached_tokens or 0 for o in told) / sum(o.num_prompt_tokens or 0 for o in told)


def _client(result: RunResult) -> ClientSummary:
    lag_s = Spread.of(outcome.lag_s for outcome in result.outcomes)
    max_cpu_share = max(result.cpu_shares, default=0.0)
    is_limit = max_cpu_share > MAX_CPU_SHARE or (lag_s is not None and lag_s.p99 > MAX_LAG_S)
    return ClientSummary(len(result.cpu_shares), max_cpu_share, lag_s, is_limit)
