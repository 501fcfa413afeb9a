"""The price of tokens on a cluster, in the currency in which devices are paid.

Owns: the calculation. Does not know: what devices are, how goodput is found.
"""

import math

import msgspec

from benchmarks.tools.planner.placements import num_devices_of
from benchmarks.tools.planner.search import Candidate

_S_PER_H = 3600
_MILLION = 1e6


class Price(msgspec.Struct, frozen=True):
    """The price of a device for an hour, and the mean number of tokens of prompt and answer together."""

    of_device_hour: float
    tokens_per_request: float

    def of_million_tokens(self, candidate: Candidate) -> float:
        """Return the price of a million tokens of prompts and answers, at the cluster's goodput.

        Infinity if the cluster serves nothing within the SLOs.
        """
        tokens_per_s = candidate.goodput_per_s * self.tokens_per_request
        if not tokens_per_s:
            return math.inf
        devices_per_s = num_devices_of(candidate.setup) * self.of_device_hour / _S_PER_H
        return _MILLION * devices_per_s / tokens_per_s
