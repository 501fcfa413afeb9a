"""What the front measures, for Prometheus.

Times are in seconds as the front sees them: from a request's arrival over HTTP to its tokens' arrival from a
worker. The `vllm:` names carry the same values for dashboards that query them.

Owns: metric names and buckets. Does not know: when something happens.
"""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake.messages import FinishReason

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


class Outcome(StrEnum):
    """How an HTTP request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"  # the client hung up
    REJECTED = "rejected"  # no room, or no cluster, before the first token
    INVALID = "invalid"
    FAILED = "failed"


class Metrics:
    """All metrics of one front, in `registry`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.registry = registry
        self._requests = counter("mooncake_requests", "HTTP generation requests by their end", "outcome")
        for outcome in Outcome:
            self._requests.labels(outcome)
        self._running = gauge("mooncake_requests_running", "Requests (choices) submitted and not yet ended")
        self._stale = counter("mooncake_stale_outputs", "Token messages of ended requests or older attempts")

        vllm = {"model_name": model_name}
        prompt_text, cached_text = "Prompt tokens", "Prompt tokens whose KVCache was reused"
        generated_text, ttft_text = "Tokens generated", "Time to first token"
        gap_text, name = "Time between tokens", "model_name"
        self._prompt_tokens = (
            counter("mooncake_prompt_tokens", prompt_text),
            counter("vllm:prompt_tokens", prompt_text, name).labels(**vllm),
            counter("vllm:prefix_cache_queries", prompt_text, name).labels(**vllm),
        )
        self._cached_tokens = (
            counter("mooncake_cached_prompt_tokens", cached_text),
            counter("vllm:prefix_cache_hits", cached_text, name).labels(**vllm),
        )
        self._generation_tokens = (
            counter("mooncake_generation_tokens", generated_text),
            counter("vllm:generation_tokens", generated_text, name).labels(**vllm),
        )
        self._ttft_s = (
            histogram("mooncake_time_to_first_token_seconds", ttft_text, TTFT_BUCKETS_S),
            histogram("vllm:time_to_first_token_seconds", ttft_text, TTFT_BUCKETS_S, name).labels(**vllm),
        )
        self._gap_s = (
            histogram("mooncake_token_gap_seconds", gap_text, GAP_BUCKETS_S),
            histogram("vllm:inter_token_latency_seconds", gap_text, GAP_BUCKETS_S, name).labels(**vllm),
        )
        self._e2e_s = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", E2E_BUCKETS_S, name
        ).labels(**vllm)
        success = counter("vllm:request_success", "Choices by finish reason", name, "finished_reason")
        self._success = {
            reason: success.labels(finished_reason=reason.value, **vllm) for reason in FinishReason
        }
        self._receiving = gauge("vllm:num_requests_running", "Choices that receive tokens", name).labels(
            **vllm
        )
        self._waiting = gauge("vllm:num_requests_waiting", "Choices without a token yet", name).labels(**vllm)

    def request_ended(self, outcome: Outcome) -> None:
        """One HTTP request has its answer, or needs none any more."""
        self._requests.labels(outcome).inc()

    def choice_submitted(self) -> None:
        """A choice waits for its first token."""
        self._running.inc()
        self._waiting.inc()

    def choice_started(self, ttft_s: float) -> None:
        """A choice has its first token."""
        self._waiting.dec()
        self._receiving.inc()
        for histogram in self._ttft_s:
            histogram.observe(ttft_s)

    def choice_ended(self, started: bool) -> None:
        """A choice is over, for whatever reason."""
        self._running.dec()
        (self._receiving if started else self._waiting).dec()

    def choice_finished(self, reason: FinishReason, latency_s: float) -> None:
        """A choice has all of its tokens."""
        self._success[reason].inc()
        self._e2e_s.observe(latency_s)

    def tokens_received(self, num_tokens: int, gap_s: float | None) -> None:
        """Tokens of one step, `gap_s` after those before; None for the first."""
        for counter in self._generation_tokens:
            counter.inc(num_tokens)
        if gap_s is not None:
            for histogram in self._gap_s:
                histogram.observe(gap_s)

    def prompt_received(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt was computed or found in the cache."""
        for counter in self._prompt_tokens:
            counter.inc(num_tokens)
        for counter in self._cached_tokens:
            counter.inc(num_cached_tokens)

    def output_dropped(self) -> None:
        """A token message that belongs to nothing that is wanted."""
        self._stale.inc()
