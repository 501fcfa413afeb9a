"""How long prefills and decode steps take, learned by instance while they happen (Mooncake, section 6.1).

A cost is a polynomial with three coefficients (`mooncake.messages.costs`). An estimator begins with those
of a profile, or with generic ones, and corrects them by recursive least squares on relative errors. Its
prior says that coefficients are mostly wrong together, by the speed of the machine: what short prompts
teach holds for long ones as well. A surprise counts only up to a limit; several in a row in one direction
are a change, and rescale everything at once.

Owns: coefficients by slot. Does not know: requests, queues, the clock.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake.messages.costs import Costs

Floats = NDArray[np.floating[Any]]
"""float64"""

_COMMON_DOUBT = 0.5
"""of all start coefficients together, relative"""
_FORGETTING = 1e-3
"""share of that doubt that comes back with every observation"""
_LARGEST_SURPRISE = 3.0
"""in standard deviations of what was expected"""
_SURPRISES_TO_RESCALE = 4
_SMALLEST_SHARE = 1e-3
"""a coefficient does not fall below this share of where it began"""


GENERIC_PREFILL_COSTS = Costs(1e-3, 2e-5, 1e-9)
GENERIC_DECODE_COSTS = Costs(5e-3, 1e-4, 1e-8)
"""Quick rather than slow: who is believed to be too slow is given nothing, and cannot show that it is not.
The first observation sets the scale."""


class Doubt(NamedTuple):
    """Standard deviations, relative. `noise`: of a single duration from the polynomial; `shape`: of each
    start coefficient, beside what all have in common."""

    noise: float
    shape: float


PREFILL_DOUBT, DECODE_DOUBT = Doubt(0.15, 0.3), Doubt(0.05, 1.0)
"""The time of a step is a mean of many, and what a request adds to it differs much between devices."""


_Covariance = Sequence[float]
"""the upper half of 3 x 3, row by row: too small for arrays, with which learning took ten times as long"""


class CostEstimator:
    """Coefficients of all slots. `is_profiled`: `start` was measured, its scale is roughly right."""

    def __init__(self, start: Costs, doubt: Doubt, *, is_profiled: bool) -> None:
        self._start = start
        self._least = [_SMALLEST_SHARE * coefficient for coefficient in start]
        self._noise_variance, self._shape_variance = doubt.noise**2, doubt.shape**2
        self._is_profiled = is_profiled
        self._coefficients = np.ones((3, 0))
        self.constant_s, self.first_s, self.second_s = self._coefficients
        """its rows: coefficients by slot"""
        self._covariances: list[_Covariance] = []
        self._has_scale: list[bool] = []
        self._num_surprises: list[int] = []  # in a row; negative: less than expected

    def reset(self, slot: int) -> None:
        """Another instance has this slot now; slots are added as needed."""
        while len(self._has_scale) <= slot:
            self._has_scale.append(False)
            self._num_surprises.append(0)
            self._covariances.append(self._covariance((0.0, 0.0, 0.0)))
        num_slots = len(self._has_scale)
        missing = np.ones((3, num_slots - len(self.constant_s)))
        self._coefficients = np.append(self._coefficients, missing, axis=1)
        self.constant_s, self.first_s, self.second_s = self._coefficients
        self._begin_at(slot, self._start)
        self._has_scale[slot] = self._is_profiled

    def predict_s(self, slot: int, first: float, second: float) -> float:
        """Seconds on one instance."""
        constant_s, first_s, second_s = self._of(slot)
        return constant_s + first * first_s + second * second_s

    def mean(self, slots: NDArray[np.bool_]) -> Costs:
        """Of these slots, of which there is at least one."""
        num_slots = int(np.count_nonzero(slots))
        return Costs(*(self._coefficients @ slots / num_slots).tolist())

    def learn(self, slot: int, first: float, second: float, seconds: float) -> None:
        """So long it took."""
        before = self._of(slot)
        predicted_s = before[0] + first * before[1] + second * before[2]
        error = seconds / predicted_s - 1.0
        features = 1.0 / predicted_s, first / predicted_s, second / predicted_s
        covariance = self._covariances[slot]
        gain = _times(covariance, features)
        variance = _product(features, gain) + self._noise_variance
        largest = _LARGEST_SURPRISE * math.sqrt(variance)
        if self._is_change(slot, error, largest):
            scale = seconds / predicted_s
            scaled = [max(scale * one, least) for one, least in zip(before, self._least, strict=True)]
            self._begin_at(slot, scaled)
            self._has_scale[slot] = True
            return
        step = min(max(error, -largest), largest) / variance
        learned = [
            max(coefficient + step * of_gain, least)
            for coefficient, of_gain, least in zip(before, gain, self._least, strict=True)
        ]
        self._put(slot, learned)
        told = _outer(gain, 1.0 / variance, 1.0 / variance)
        doubt = self._covariance(learned)
        self._covariances[slot] = [
            (1.0 - _FORGETTING) * (before - known) + _FORGETTING * doubted
            for before, known, doubted in zip(covariance, told, doubt, strict=True)
        ]

    def _is_change(self, slot: int, error: float, largest: float) -> bool:
        if not self._has_scale[slot]:
            return True
        before = self._num_surprises[slot]
        if abs(error) <= largest / 2:  # a machine that is much quicker errs by less than 1
            self._num_surprises[slot] = 0
        else:
            self._num_surprises[slot] = max(before, 0) + 1 if error > 0 else min(before, 0) - 1
        return abs(self._num_surprises[slot]) >= _SURPRISES_TO_RESCALE

    def _begin_at(self, slot: int, coefficients: Sequence[float]) -> None:
        self._put(slot, coefficients)
        self._covariances[slot] = self._covariance(coefficients)
        self._num_surprises[slot] = 0

    def _covariance(self, coefficients: Sequence[float]) -> _Covariance:
        """Covariance of coefficients that were measured elsewhere."""
        common = _COMMON_DOUBT**2
        return _outer(coefficients, common + self._shape_variance, common)

    def _of(self, slot: int) -> tuple[float, float, float]:
        return self.constant_s.item(slot), self.first_s.item(slot), self.second_s.item(slot)

    def _put(self, slot: int, coefficients: Sequence[float]) -> None:
        self._coefficients[:, slot] = coefficients


def _outer(of: Sequence[float], squares: float, others: float) -> _Covariance:
    """The products of three numbers, times a factor for squares and one for others."""
    a, b, c = of
    return squares * a * a, others * a * b, others * a * c, squares * b * b, others * b * c, squares * c * c


def _times(covariance: _Covariance, vector: Sequence[float]) -> tuple[float, float, float]:
    aa, ab, ac, bb, bc, cc = covariance
    a, b, c = vector
    return aa * a + ab * b + ac * c, ab * a + bb * b + bc * c, ac * a + bc * b + cc * c


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
