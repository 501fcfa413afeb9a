"""Where a transfer begins to show, by the model and as measured."""

import pytest

from benchmarks.prefill.bench import BLOCK_SIZE, LAYOUT
from benchmarks.prefill.links import (
    LAYER_BYTES,
    LONGER,
    NUM_LAYERS,
    OverLink,
    crossover,
    needed_bits_per_s,
)


def over_link(bits_per_s: float) -> OverLink:
    """A prefill of 1 s whose transfer is that of equation 13."""
    transfer_s = 8 * 512 * LAYER_BYTES / bits_per_s
    return OverLink(512, 1024, bits_per_s, transfer_s, 1 / NUM_LAYERS, 1.0, 1.0)


def test_the_arithmetic_is_that_of_the_measured_model() -> None:
    assert (LAYOUT.num_layers, LAYOUT.layer_bytes) == (NUM_LAYERS, BLOCK_SIZE * LAYER_BYTES)


def test_at_the_needed_bandwidth_a_layer_arrives_in_the_time_of_its_computation() -> None:
    at = over_link(needed_bits_per_s(512, 1.0))
    assert at.link_s == pytest.approx(1 / NUM_LAYERS)
    assert at.model_s == pytest.approx(1 + 1 / NUM_LAYERS)


def test_the_transfer_shows_where_the_time_passes_the_limit() -> None:
    needed = needed_bits_per_s(512, 1.0)
    links = [over_link(factor * needed) for factor in (2.0, 1.0, 0.5)]
    at = crossover([(link.bits_per_s, link.model_s) for link in links])
    assert at is not None
    assert at == pytest.approx(needed / (LONGER - 1 / NUM_LAYERS))
    assert crossover([(link.bits_per_s, 1.0) for link in links]) is None
    assert crossover([(link.bits_per_s, 2.0) for link in links]) is None
