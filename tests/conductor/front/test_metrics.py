"""What the front tells Prometheus: buckets, goodput, vLLM's names beside our own, and what counting costs."""

import math
import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conductor.front.metrics import GAP_BUCKETS_S, TTFT_BUCKETS_S, Distribution, Metrics
from mooncake.messages.requests import FinishReason

VLLM_NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens"),
    *("vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:request_success"),
}


class Told:
    """Metrics, and what a scraper reads of them."""

    def __init__(self, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, "m", ttft_slo_s, tbt_slo_s)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def finish(self, ttft_s: float, gaps_s: list[float]) -> None:
        self.metrics.choice_finished(FinishReason.STOP, ttft_s + sum(gaps_s), ttft_s, gaps_s)

    def within_slo(self) -> dict[str, float | None]:
        return {
            slo: self.value("mooncake_requests_within_slo_total", slo=slo) for slo in ("ttft", "tbt", "both")
        }


def test_goodput_counts_what_is_within_both_slos() -> None:
    told = Told(ttft_slo_s=1.0, tbt_slo_s=0.1)
    told.finish(1.0, [0.1] * 5)
    told.finish(1.1, [0.1] * 5)
    told.finish(0.5, [0.01, 0.2])
    told.finish(0.5, [])  # one token has no gaps
    told.finish(9.9, [9.9])
    assert told.within_slo() == {"ttft": 3, "tbt": 3, "both": 2}
    assert told.value("vllm:request_success_total", model_name="m", finished_reason="stop") == 5
    assert told.value("mooncake_slo_seconds", slo="ttft") == 1.0


def test_without_slos_everything_is_in_time() -> None:
    told = Told()
    told.finish(1e6, [1e6])
    assert told.within_slo() == {"ttft": 1, "tbt": 1, "both": 1}
    assert told.value("mooncake_slo_seconds", slo="ttft") is None


def test_an_observation_at_a_bound_is_below_it() -> None:
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        distribution.observe(value)
    assert distribution.buckets == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert distribution.sum == 7.5


def test_the_same_is_told_under_both_names() -> None:
    told = Told()
    told.metrics.choice_submitted()
    told.metrics.choice_submitted()
    told.metrics.choice_started(0.05)
    told.metrics.tokens_received(1, None)
    told.metrics.tokens_received(2, 0.03)
    told.metrics.prompt_received(100, 64)
    families = {
        family.name: family
        for family in text_string_to_metric_families(generate_latest(told.registry).decode())
    }
    assert families.keys() >= VLLM_NAMES
    for own, vllm in [
        ("mooncake_generation_tokens_total", "vllm:generation_tokens_total"),
        ("mooncake_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        ("mooncake_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"),
        ("mooncake_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
        ("mooncake_token_gap_seconds_count", "vllm:inter_token_latency_seconds_count"),
    ]:
        assert told.value(own) == told.value(vllm, model_name="m") > 0, own  # type: ignore[operator]
    assert told.value("vllm:num_requests_waiting", model_name="m") == 1
    assert told.value("vllm:num_requests_running", model_name="m") == 1
    assert told.value("mooncake_requests_running") == 2
    bounds = [
        s.labels["le"] for s in families["vllm:time_to_first_token_seconds"].samples if "le" in s.labels
    ]
    assert list(map(float, bounds)) == [*TTFT_BUCKETS_S, math.inf]
    bounds = [s.labels["le"] for s in families["mooncake_token_gap_seconds"].samples if "le" in s.labels]
    assert list(map(float, bounds)) == [*GAP_BUCKETS_S, math.inf]


def test_counting_a_token_costs_next_to_nothing() -> None:
    """A token costs the front some 50 us; 3% of that are allowed. It takes about 0.2 us."""
    metrics, num_tokens = Told().metrics, 20_000
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(num_tokens):
            metrics.tokens_received(1, 0.03)
        took_s.append((time.process_time() - began_s) / num_tokens)
    assert min(took_s) < 1.5e-6
