"""How instances on one machine slow each other down, and how iterations vary on a real machine.

Instances on machines of their own, as in all clusters made from cards, have no such effects.

Owns: which instances compute at the same time, how iterations vary. Does not know: what is computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

LONGEST_SHARE = 0.1
"""The share of a request's token gaps that count for its TBT, which is the mean of the longest gaps."""
_SEED = 0


@dataclass(slots=True)
class Machine:
    """One machine for all instances.

    An instance's iterations take `slowdown` times as long while others compute. An instance's `on_change` is
    called when its slowdown begins or ends.
    """

    slowdown: dict[str, float]
    """The slowdown of each instance, by name."""
    on_change: dict[str, Callable[[], None]] = field(default_factory=dict)
    _computing: set[str] = field(default_factory=set)

    def factor(self, name: str) -> float:
        """Return the present factor of an instance's durations."""
        return self.slowdown[name] if self._computing - {name} else 1.0

    def computes(self, name: str, is_computing: bool) -> None:
        """Record that an instance computes from now on, or no longer."""
        if is_computing == (name in self._computing):
            return
        if is_computing:
            self._computing.add(name)
        else:
            self._computing.remove(name)
        for other, on_change in self.on_change.items():
            if other != name:
                on_change()


class IterationJitter:
    """Random factors of gaps between tokens, lognormal with mean 1.

    `longest_mean` is the mean of the largest tenth of the factors of gaps of `gap_s` seconds. Disturbances
    come at random times, so a gap of n times that length has factors with a deviation that is smaller by the
    square root of n.
    """

    def __init__(self, longest_mean: float, gap_s: float) -> None:
        self._sigma, self._gap_s = _sigma_of(longest_mean), gap_s
        self._rng = np.random.default_rng(_SEED)

    def applied(self, gaps: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the gaps, each multiplied by a random factor.

        Gaps are pairs (number of gaps, seconds of each).
        """
        seconds = np.repeat([each_s for _, each_s in gaps], [number for number, _ in gaps])
        sigmas = self._sigma * np.sqrt(self._gap_s / seconds)
        factors = np.exp(sigmas * self._rng.standard_normal(len(seconds)) - sigmas**2 / 2)
        return [(1, float(gap_s)) for gap_s in seconds * factors]


def _sigma_of(longest_mean: float) -> float:
    """Return the sigma with which the largest tenth of the factors have this mean.

    A lognormal variable with mean 1 has a mean of (1 - Phi(z - sigma)) / share beyond its quantile z.
    """
    normal = NormalDist()
    beyond = min(max(LONGEST_SHARE * longest_mean, LONGEST_SHARE), 1 - 1e-6)
    sigma = normal.inv_cdf(1 - LONGEST_SHARE) - normal.inv_cdf(1 - beyond)
    return 0.0 if math.isclose(longest_mean, 1.0) else max(0.0, sigma)
