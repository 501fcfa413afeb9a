"""BanaServe's objective (section 4.3, equation 18)."""

from dataclasses import replace

import msgspec
import pytest

from conductor.performance.model import DecodeCapacity, Pairs, Sizes
from conductor.performance.objective import Terms, Weights
from mooncake.messages.costs import Costs

TERMS = Terms(utilisation=0.5, latency_s=1.5, output_tokens_per_s=200.0)


def test_the_objective_is_utilisation_less_latency_plus_throughput() -> None:
    assert TERMS.objective(Weights(2.0, 3.0, 0.01)) == pytest.approx(2 * 0.5 - 3 * 1.5 + 0.01 * 200)


@pytest.mark.parametrize(
    ("field", "is_better"), [("utilisation", True), ("latency_s", False), ("output_tokens_per_s", True)]
)
def test_each_term_counts_by_its_own_weight(field: str, is_better: bool) -> None:
    more = msgspec.structs.replace(TERMS, **{field: 2 * getattr(TERMS, field)})
    for position, name in enumerate(Terms.__struct_fields__):
        weights = Weights(*(float(n == position) for n in range(3)))
        gain = more.objective(weights) - TERMS.objective(weights)
        assert (gain > 0) == (is_better and name == field)
        assert (gain == 0) == (name != field)


def test_predicted_utilisation_is_the_mean_over_all_instances() -> None:
    """Equations 19 and 27: idle instances count."""
    capacity = DecodeCapacity(Costs(0.005, 1e-4, 1e-7), max_batch=64, num_device_tokens=100_000)
    few = Pairs(1, 1, Costs(0.01, 1e-4, 1e-9), capacity, num_layers=32)
    of_few, of_many = (
        of.performance(Sizes(1000, 101), 4).terms for of in (few, replace(few, num_prefill=1, num_decode=3))
    )
    found = few.performance(Sizes(1000, 101), 4)
    assert of_few.utilisation == pytest.approx((found.prefill_utilisation + found.decode_utilisation) / 2)
    assert of_many.utilisation < 0.6 * of_few.utilisation
    assert of_few.latency_s == found.ttft_s + found.tpot_s
    assert of_few.output_tokens_per_s == found.output_tokens_per_s
