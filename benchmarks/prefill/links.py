"""Prefills whose prefix arrives over a link, beside the model of BanaServe, section 4.2.

Owns: the arithmetic. Does not know: how prefills are measured.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from conductor.performance.model import overlapped_s

NUM_LAYERS, LAYER_BYTES = 30, 3 * 64 * 2 * 2
"""The layers of SmolLM2-135M, and S_kv: the bytes of a token's KVCache in one layer (equation 15)."""
LONGER = 1.05
"""The transfer shows in a prefill that takes this many times as long as the computation alone."""


class OverLink(NamedTuple):
    """A prefill of `num_tokens` of which `num_cached` came over a link of `bits_per_s`."""

    num_cached: int
    num_tokens: int
    bits_per_s: float
    transfer_s: float
    """The mean of T_KV, the time between the arrivals of two layers."""
    compute_s: float
    """The mean of T_F,layer, the time to compute a layer."""
    alone_s: float
    """The seconds of the computation without any transfer."""
    total_s: float
    """The seconds from the order to the first token."""

    @property
    def link_s(self) -> float:
        """T_KV by equation 13."""
        return _layer_bits(self.num_cached) / self.bits_per_s

    @property
    def model_s(self) -> float:
        """The seconds by the model, from the computation alone and the measured transfer."""
        return overlapped_s(self.alone_s, NUM_LAYERS * self.transfer_s, NUM_LAYERS)


def needed_bits_per_s(num_cached: int, alone_s: float) -> float:
    """Return the bandwidth at which T_KV (equation 13) is the time of a layer in the computation alone."""
    return _layer_bits(num_cached) * NUM_LAYERS / alone_s


def crossover(ratios: Sequence[tuple[float, float]]) -> float | None:
    """Return the bandwidth below which the transfer shows in the time of a prefill (`LONGER`).

    `ratios` has bandwidths, falling, and times as multiples of the computation's. Between two bandwidths the
    time is taken to be linear in the time of the transfer. Returns None if the transfer shows at all
    bandwidths, or at none.
    """
    for (fast, before), (slow, after) in itertools.pairwise(ratios):
        if before <= LONGER < after:
            share = (LONGER - before) / (after - before)
            return 1 / ((1 - share) / fast + share / slow)
    return None


def _layer_bits(num_tokens: int) -> float:
    return 8 * num_tokens * LAYER_BYTES
