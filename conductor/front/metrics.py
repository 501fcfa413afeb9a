"""Metrics of the front, for Prometheus.

Times are in seconds as the front sees them: from a request's arrival over HTTP to its tokens' arrival from a
worker. The `vllm:` names carry the same values for dashboards that query them.

Counting happens for every token and must be cheap, so it only adds to plain numbers. Names, labels and the
format are added at a scrape. All calls are made in the thread of the front's event loop.

Owns: metric names and buckets, the comparison with SLOs. Does not know: when something happens.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mooncake.messages.costs import tbt_s
from mooncake.messages.requests import FinishReason

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
GAP_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1),
    *(0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
REJECTION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)


class RequestOutcome(StrEnum):
    """The way in which an HTTP request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"  # the client hung up
    REJECTED = "rejected"  # status 429 or 503: no capacity, or no cluster
    INVALID = "invalid"
    FAILED = "failed"


class Denial(StrEnum):
    """The reason why a front itself refused a request."""

    NO_KEY = "no_key"
    LIMIT = "limit"


class Distribution:
    """A histogram, which counts observations in buckets. A bucket has the values up to its upper bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket, as text, and its cumulative count; the last bound is infinite."""
        bounds = (*self._bounds, math.inf)
        return list(zip(map(floatToGoString, bounds), map(float, accumulate(self._counts)), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class Metrics(Collector):
    """The metrics of one front's requests, registered on creation.

    An SLO is in seconds, and None is no limit.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        ttft_slo_s: float | None = None,
        tbt_slo_s: float | None = None,
    ) -> None:
        self._model_name = model_name
        self._ttft_slo_s, self._tbt_slo_s = ttft_slo_s, tbt_slo_s
        self._outcomes = Counter(dict.fromkeys(RequestOutcome, 0))
        self._denied = Counter(dict.fromkeys(Denial, 0))
        self._finished = Counter(dict.fromkeys(FinishReason, 0))
        self._within_slo = Counter({"ttft": 0, "tbt": 0, "both": 0})
        self._num_waiting = self._num_receiving = 0
        self._num_stale = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        self._ttft = Distribution(TTFT_BUCKETS_S)
        self._gap = Distribution(GAP_BUCKETS_S)
        self._tbt = Distribution(GAP_BUCKETS_S)
        self._e2e = Distribution(E2E_BUCKETS_S)
        self._rejected_after = Distribution(REJECTION_BUCKETS_S)
        registry.register(self)

    # -- what happens -----------------------------------------------------------------------------

    def request_ended(self, outcome: RequestOutcome) -> None:
        """Count an HTTP request for generation that has ended."""
        self._outcomes[outcome] += 1

    def request_denied(self, reason: Denial) -> None:
        """Count a request without a valid key, or beyond its key's limits."""
        self._denied[reason] += 1

    def choice_submitted(self) -> None:
        """Count a choice that waits for its first token."""
        self._num_waiting += 1

    def choice_started(self, ttft_s: float) -> None:
        """Count a choice that has got its first token, `ttft_s` seconds after its HTTP request arrived."""
        self._num_waiting -= 1
        self._num_receiving += 1
        self._ttft.observe(ttft_s)

    def choice_ended(self, started: bool) -> None:
        """Count a choice that has ended, for whatever reason. `started` is whether it has got a token."""
        if started:
            self._num_receiving -= 1
        else:
            self._num_waiting -= 1

    def choice_rejected(self, seconds: float) -> None:
        """Count a choice that was rejected with 429, `seconds` after its HTTP request arrived."""
        self._rejected_after.observe(seconds)

    def choice_finished(
        self, reason: FinishReason, latency_s: float, ttft_s: float, gaps_s: Sequence[float]
    ) -> None:
        """Count a choice that has all of its tokens, and compare its times with the SLOs.

        `latency_s` and `ttft_s` are the seconds from the HTTP request's arrival to the choice's end and to
        its first token. `gaps_s` are the seconds between the choice's iterations.
        """
        self._finished[reason] += 1
        self._e2e.observe(latency_s)
        of_choice_s = tbt_s(gaps_s)
        if of_choice_s is not None:
            self._tbt.observe(of_choice_s)
        has_ttft = self._ttft_slo_s is None or ttft_s <= self._ttft_slo_s
        has_tbt = self._tbt_slo_s is None or of_choice_s is None or of_choice_s <= self._tbt_slo_s
        self._within_slo["ttft"] += has_ttft
        self._within_slo["tbt"] += has_tbt
        self._within_slo["both"] += has_ttft and has_tbt

    def tokens_received(self, num_tokens: int, gap_s: float | None) -> None:
        """Count the tokens that one iteration has given to a choice.

        `gap_s` are the seconds since the choice's previous iteration; None for its first iteration.
        """
        self._num_generated_tokens += num_tokens
        if gap_s is not None:
            self._gap.observe(gap_s)

    def prompt_received(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the tokens of a prompt. `num_cached_tokens` of them were not computed, but reused."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached_tokens

    def output_dropped(self) -> None:
        """Count an output that was dropped: its request is not in flight, or its attempt was replaced."""
        self._num_stale += 1

    # -- what is scraped --------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics under their own names, and some of them under vLLM's names as well."""
        yield from self._own()
        yield from self._as_vllm()

    def _own(self) -> Iterator[Metric]:
        yield _counters(
            "mooncake_requests", "HTTP generation requests by their end", "outcome", self._outcomes
        )
        yield _counters(
            "mooncake_requests_denied",
            "HTTP requests that their API key did not let in",
            "reason",
            self._denied,
        )
        yield GaugeMetricFamily(
            "mooncake_requests_running",
            "Requests (choices) submitted and not yet ended",
            self._num_waiting + self._num_receiving,
        )
        yield _counters(
            "mooncake_requests_within_slo",
            "Finished choices whose TTFT, TBT, or both (goodput) were within the SLO; all if there is none",
            "slo",
            self._within_slo,
        )
        slos = GaugeMetricFamily("mooncake_slo_seconds", "The SLOs that are set", labels=["slo"])
        for name, slo_s in (("ttft", self._ttft_slo_s), ("tbt", self._tbt_slo_s)):
            if slo_s is not None:
                slos.add_metric([name], slo_s)
        yield slos
        yield CounterMetricFamily(
            "mooncake_stale_outputs", "Token messages of ended requests or older attempts", self._num_stale
        )
        yield CounterMetricFamily("mooncake_prompt_tokens", "Prompt tokens", self._num_prompt_tokens)
        yield CounterMetricFamily(
            "mooncake_cached_prompt_tokens",
            "Prompt tokens whose KVCache was reused",
            self._num_cached_tokens,
        )
        yield CounterMetricFamily(
            "mooncake_generation_tokens", "Tokens generated", self._num_generated_tokens
        )
        for name, text, distribution in (
            ("mooncake_time_to_first_token_seconds", "Time to first token", self._ttft),
            ("mooncake_token_gap_seconds", "Time between two steps of a choice", self._gap),
            (
                "mooncake_request_tbt_seconds",
                "TBT of a finished choice: the mean of its longest 10% of gaps",
                self._tbt,
            ),
            (
                "mooncake_time_to_rejection_seconds",
                "From an HTTP request's arrival to the word that there is no room for it (429)",
                self._rejected_after,
            ),
        ):
            yield HistogramMetricFamily(name, text, distribution.buckets, distribution.sum)

    def _as_vllm(self) -> Iterator[Metric]:
        model = [self._model_name]
        for name, text, num_tokens in (
            ("vllm:prompt_tokens", "Prompt tokens", self._num_prompt_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens", self._num_prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens whose KVCache was reused", self._num_cached_tokens),
            ("vllm:generation_tokens", "Tokens generated", self._num_generated_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(model, num_tokens)
            yield counter
        for name, text, num_choices in (
            ("vllm:num_requests_running", "Choices that receive tokens", self._num_receiving),
            ("vllm:num_requests_waiting", "Choices without a token yet", self._num_waiting),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(model, num_choices)
            yield gauge
        for name, text, distribution in (
            ("vllm:time_to_first_token_seconds", "Time to first token", self._ttft),
            ("vllm:inter_token_latency_seconds", "Time between two steps of a choice", self._gap),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token", self._e2e),
        ):
            histogram = HistogramMetricFamily(name, text, labels=["model_name"])
            histogram.add_metric(model, distribution.buckets, distribution.sum)
            yield histogram
        success = CounterMetricFamily(
            "vllm:request_success", "Choices by finish reason", labels=["model_name", "finished_reason"]
        )
        for reason, num_choices in self._finished.items():
            success.add_metric([*model, reason.value], num_choices)
        yield success


def _counters(
    name: str, text: str, label: str, counts: Counter[RequestOutcome] | Counter[Denial] | Counter[str]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family
