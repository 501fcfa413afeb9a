"""Predicted durations of prefills and of decode iterations, learned for each instance.

They are the time costs of Mooncake, section 6.1. A cost is a polynomial with three coefficients
(`mooncake.messages.costs`). An estimator begins with the coefficients of a profile, or with generic ones, and
corrects them by recursive least squares on relative errors. The prior assumes that all coefficients are wrong
by about one factor, the speed of the machine. So short prompts also correct predictions for long ones. A
large error counts only up to a limit. Several large errors in a row in one direction are taken as a change of
speed: they rescale all coefficients at once.

Owns: coefficients by slot, the mean of the decode instances. Does not know: requests, queues, the clock.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake.messages.costs import Costs, batch_share

Floats = NDArray[np.floating[Any]]
"""An array of float64."""

_COMMON_DOUBT = 0.5
"""The relative standard deviation of the common factor by which all start coefficients may be wrong."""
_FORGETTING = 1e-3
"""The share of the initial variance that is added again with every observation."""
_LARGEST_SURPRISE = 3.0
"""The largest error that counts in full, in standard deviations of the expected errors."""
_SURPRISES_TO_RESCALE = 4
"""The number of large errors in a row that are taken as a change of speed."""
_SMALLEST_SHARE = 1e-3
"""The smallest value of a coefficient, as a share of its start value."""


GENERIC_PREFILL_COSTS = Costs(1e-3, 2e-5, 1e-9)
GENERIC_DECODE_COSTS = Costs(5e-3, 1e-4, 1e-8)
"""Costs before the first observation, which sets the scale.

They are chosen too low rather than too high: an instance that is believed to be too slow gets no requests,
and cannot show that it is fast.
"""


class Doubt(NamedTuple):
    """Relative standard deviations that an estimator starts with."""

    noise: float
    """The deviation of a single duration from the polynomial."""
    shape: float
    """The deviation of each start coefficient from the common factor."""


PREFILL_DOUBT, DECODE_DOUBT = Doubt(0.15, 0.3), Doubt(0.05, 1.0)
"""The doubts of prefill and of decode costs.

Decode has less noise, as means of many iterations are measured. It has more doubt of the shape, as the time
that a request adds differs between devices.
"""


_Covariance = Sequence[float]
"""The upper half of a 3 x 3 covariance matrix, row by row. NumPy arrays would take ten times as long."""


class CostEstimator:
    """The learned cost coefficients of all slots.

    Args:
        start: The coefficients of a new instance.
        doubt: The expected errors of `start` and of single durations.
        is_profiled: Whether `start` was measured, so that its scale is roughly right.
    """

    def __init__(self, start: Costs, doubt: Doubt, *, is_profiled: bool) -> None:
        self._start = start
        self._least = [_SMALLEST_SHARE * coefficient for coefficient in start]
        self._noise_variance, self._shape_variance = doubt.noise**2, doubt.shape**2
        self._is_profiled = is_profiled
        self._coefficients = np.ones((3, 0))
        self.constant_s, self.first_s, self.second_s = self._coefficients
        """The rows of the matrix: each coefficient by slot."""
        self._covariances: list[_Covariance] = []
        self._has_scale: list[bool] = []
        self._has_learned = np.zeros(0, np.bool_)
        self._kind_at = np.zeros(0, np.int64)
        self._kinds: dict[Hashable, int] = {}
        self._num_surprises: list[int] = []  # large errors in a row; negative if shorter than predicted

    def reset(self, slot: int, kind: Hashable = None) -> None:
        """Reset the costs of a slot for another instance. Slots are added as needed.

        Args:
            slot: The slot of the instance.
            kind: A value that instances of equal speed have in common. `adopt` copies costs among them.
        """
        while len(self._has_scale) <= slot:
            self._has_scale.append(False)
            self._num_surprises.append(0)
            self._covariances.append(self._covariance((0.0, 0.0, 0.0)))
            self._has_learned = np.append(self._has_learned, False)
            self._kind_at = np.append(self._kind_at, 0)
            self._coefficients = np.append(self._coefficients, np.ones((3, 1)), axis=1)
            self.constant_s, self.first_s, self.second_s = self._coefficients
        self._begin_at(slot, self._start)
        self._has_scale[slot], self._has_learned[slot] = self._is_profiled, False
        self._kind_at[slot] = self._kinds.setdefault(kind, len(self._kinds))
        self.adopt(slot)

    def adopt(self, slot: int) -> None:
        """Copy the costs that instances of the same kind have learned, if this instance has learned nothing.

        With generic costs, which are too low, an instance that joins others would get all prompts until it
        has computed its first prompt. If no instance of the kind has learned, the costs stay.
        """
        if not self._has_learned[slot] and (learned := self._learned_alike(slot)).any():
            self._begin_at(slot, self.mean(learned))
            self._has_scale[slot] = True

    def _learned_alike(self, slot: int) -> NDArray[np.bool_]:
        """Return for each slot whether its instance has learned, and is of the kind of `slot`'s instance."""
        is_alike: NDArray[np.bool_] = self._kind_at == self._kind_at[slot]
        return self._has_learned & is_alike

    def release(self, slot: int) -> None:
        """Record that the slot has no instance any more, so that no other slot adopts its costs."""
        self._has_learned[slot] = False

    def quickest_alike(self, slot: int, first: float, second: float) -> int:
        """Return the slot with the shortest predicted duration among instances of this slot's kind.

        `first` and `second` are the polynomial's two variables. Only instances that have learned are
        compared. If none has, `slot` itself is returned.
        """
        constant_s, first_s, second_s = self._coefficients
        seconds = np.where(
            self._learned_alike(slot), constant_s + first * first_s + second * second_s, math.inf
        )
        quickest = int(seconds.argmin())
        return quickest if seconds[quickest] < math.inf else slot

    def predict_s(self, slot: int, first: float, second: float) -> float:
        """Predict the seconds on one instance, given the polynomial's two variables."""
        constant_s, first_s, second_s = self._of(slot)
        return constant_s + first * first_s + second * second_s

    def mean(self, slots: NDArray[np.bool_]) -> Costs:
        """Return the mean coefficients of these slots. There must be at least one."""
        num_slots = int(np.count_nonzero(slots))
        return Costs(*(self._coefficients @ slots / num_slots).tolist())

    def learn(self, slot: int, first: float, second: float, seconds: float) -> None:
        """Update the coefficients of a slot by one measured duration in seconds."""
        self._has_learned[slot] = True
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
        """Return the prior covariance of start coefficients."""
        common = _COMMON_DOUBT**2
        return _outer(coefficients, common + self._shape_variance, common)

    def _of(self, slot: int) -> tuple[float, float, float]:
        return self.constant_s.item(slot), self.first_s.item(slot), self.second_s.item(slot)

    def _put(self, slot: int, coefficients: Sequence[float]) -> None:
        self._coefficients[:, slot] = coefficients


def _outer(of: Sequence[float], squares: float, others: float) -> _Covariance:
    """Return the outer product of three numbers with themselves, scaled.

    The elements of the diagonal are multiplied by `squares`, the other elements by `others`.
    """
    a, b, c = of
    return squares * a * a, others * a * b, others * a * c, squares * b * b, others * b * c, squares * c * c


def _times(covariance: _Covariance, vector: Sequence[float]) -> tuple[float, float, float]:
    aa, ab, ac, bb, bc, cc = covariance
    a, b, c = vector
    return aa * a + ab * b + ac * c, ab * a + bb * b + bc * c, ac * a + bc * b + cc * c


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


class DecodePool(NamedTuple):
    """All decode instances that take requests, described as one: their number, slots and mean costs."""

    num_instances: int
    members: Floats
    """The weights of slots: 1 for each decode instance, 0 for other slots."""
    mean_costs: Costs
    mean_max_batch: float

    def tbt_s(self, num_requests: float, num_kv_tokens: float) -> float:
        """Predict the TBT in seconds of requests that share the batch of a mean instance."""
        batched, delay = batch_share(num_requests, self.mean_max_batch)
        return delay * self.mean_costs.seconds(batched * num_requests, batched * num_kv_tokens)
