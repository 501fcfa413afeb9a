"""The figures of a run: latencies, goodput, hits, by the papers' definitions.

A request's TBT is the mean of its longest 10% of token gaps, its TPOT the mean of all gaps. A request is
*effective* when its TTFT and TBT are both within their SLOs (Mooncake, FAST'25). Rejected and failed requests
are not effective.

Owns: the figures. Does not know: how they are shown.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.tools.simulator.cluster.machines.costs import Costs, PromptShare
from benchmarks.tools.simulator.cluster.requests import Outcome, Results
from conductor.performance.model import DecodeCapacity
from conductor.performance.objective import Terms


class SLOs(NamedTuple):
    """The SLOs by which requests are measured, in seconds; None for no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None


NO_SLOS = SLOs()


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of a time in seconds. All figures are 0 if there are no requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: "np.ndarray[Any, Any]") -> "Distribution":
        """Return the distribution of the values that are not NaN."""
        values = values[~np.isnan(values)]
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        return cls(float(values.mean()), *map(float, np.percentile(values, [50, 90, 99])))


class Summary(msgspec.Struct, frozen=True):
    """Figures of one run. Shares are from 0 to 1.

    Tokens and prefill seconds are of all requests that have ended.
    """

    num_requests: int
    num_finished: int
    num_rejected: int
    num_failed: int
    num_effective: int
    duration_s: float
    """Seconds from the first arrival to the last end."""
    goodput_per_s: float
    """Effective requests a second."""
    output_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    tbt_s: Distribution
    ttft_attainment: float
    """The share of finished requests whose TTFT is within the SLO."""
    tbt_attainment: float
    cached_share: float
    """The cached share of all input tokens, in whichever instance the tokens were cached."""
    fetched_share: float
    """The share of all input tokens that came from other instances."""
    prefill_s_per_request: float
    """The mean seconds of a device for the prefill of a request."""

    @property
    def effective_share(self) -> float:
        """The share of effective requests among all requests."""
        return self.num_effective / max(1, self.num_requests)


def summarize(results: Results, slos: SLOs = NO_SLOS) -> Summary:
    """Return the figures of one run."""
    outcome = results["outcome"]
    finished = outcome == Outcome.FINISHED
    in_ttft = _within(results["ttft_s"], slos.ttft_s) & finished
    in_tbt = _within(results["tbt_s"], slos.tbt_s) & finished
    num_finished, num_effective = int(finished.sum()), int((in_ttft & in_tbt).sum())
    num_input_tokens = max(1, int(results["num_input_tokens"].sum()))
    duration_s = float(results["end_s"].max() - results["arrival_s"].min()) if len(results) else 0.0
    per_s = 1 / duration_s if duration_s else 0.0
    return Summary(
        num_requests=len(results),
        num_finished=num_finished,
        num_rejected=int((outcome == Outcome.REJECTED).sum()),
        num_failed=int((outcome == Outcome.FAILED).sum()),
        num_effective=num_effective,
        duration_s=duration_s,
        goodput_per_s=num_effective * per_s,
        output_tokens_per_s=int(results["num_output_tokens"].sum()) * per_s,
        ttft_s=Distribution.of(results["ttft_s"]),
        tpot_s=Distribution.of(results["tpot_s"]),
        tbt_s=Distribution.of(results["tbt_s"]),
        ttft_attainment=int(in_ttft.sum()) / max(1, num_finished),
        tbt_attainment=int(in_tbt.sum()) / max(1, num_finished),
        cached_share=int(results["num_cached_tokens"].sum()) / num_input_tokens,
        fetched_share=int(results["num_fetched_tokens"].sum()) / num_input_tokens,
        prefill_s_per_request=float(results["prefill_s"].sum()) / max(1, len(results)),
    )


def terms_of(
    results: Results, summary: Summary, costs: Costs, decode: DecodeCapacity, num_instances: int
) -> Terms:
    """Return the terms of BanaServe's objective (section 4.3, equation 19).

    U_avg is the computing that the finished requests need (equations 24 and 26), divided by the seconds of
    all instances (equation 27). A prompt needs the time that an idle instance takes for it, and a further
    output token the time that it takes in the largest batch. So a decode instance that iterates all the time
    with few requests counts as little used.

    Args:
        results: The results of a run.
        summary: The figures of the same run.
        costs: The costs of an instance.
        decode: The capacity of an instance for decoding.
        num_instances: The number of instances. Each counts from the first arrival to the last end.
    """
    is_finished = results["outcome"] == Outcome.FINISHED
    columns = ("num_input_tokens", "num_cached_tokens", "num_output_tokens")
    num_input, num_cached, num_output = (results[name][is_finished] for name in columns)
    prompts = zip((num_input - num_cached).tolist(), num_cached.tolist(), strict=True)
    computing_s = sum(costs.iteration_s([PromptShare(*prompt)], 0) for prompt in prompts)
    num_gaps = num_output - 1
    if num_decoded := int(num_gaps.sum()):
        mean_kv_tokens = float((num_gaps * (num_input + num_output / 2)).sum()) / num_decoded
        computing_s += num_decoded / decode.tokens_per_s(mean_kv_tokens)
    device_s = num_instances * summary.duration_s
    return Terms(
        min(1.0, computing_s / device_s) if device_s else 0.0,
        summary.ttft_s.mean + summary.tpot_s.mean,
        summary.output_tokens_per_s,
    )


def _within(values: "np.ndarray[Any, Any]", slo_s: float | None) -> "np.ndarray[Any, Any]":
    """Return which values are within an SLO (bool, one for each value).

    NaN is within every SLO: a request with one token has no gaps.
    """
    if slo_s is None:
        return np.ones(len(values), np.bool_)
    return ~(values > slo_s)
