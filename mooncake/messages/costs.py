"""The costs of prefill and decode: polynomials with three coefficients (Mooncake, section 6.1).

    prefill of n new tokens behind c cached ones    constant + n * token + n * (c + n / 2) * pair
    one step of b requests with k KV tokens in all  constant + b * request + k * token

Owns: these forms, and their fit to measurements. Does not know: how they are measured and used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TBT_SLO_SHARE = 0.8
"""The largest share of a TBT SLO that an iteration may take with what is added to it: predictions are not
exact."""
TBT_MARGIN = 0.1
"""The share of what a batch adds to an iteration by which predictions stay below a TBT SLO."""


def tbt_margin_s(step_s: float, empty_step_s: float) -> float:
    """Return by how much a predicted iteration must stay below a TBT SLO.

    An iteration is predicted as a mean. The TBT of a request is the mean of its longest gaps, and the one
    before its second token has the transfer of its KVCache in it. How long an iteration without a batch takes
    is known well, so no margin is kept for that part.
    """
    return TBT_MARGIN * max(0.0, step_s - empty_step_s)


class Costs(NamedTuple):
    """The coefficients in seconds: constant, and for tokens and pairs, or requests and tokens."""

    constant_s: float
    first_s: float
    second_s: float

    def seconds(self, first: float, second: float) -> float:
        """Return the polynomial's value."""
        return self.constant_s + first * self.first_s + second * self.second_s


class Point(NamedTuple):
    """A measured duration: of new and cached tokens for a prefill, of requests and KV tokens for a step."""

    first: float
    second: float
    seconds: float


def prefill_quantities(num_new_tokens: float, num_cached_tokens: float) -> tuple[float, float]:
    """Return new tokens, and pairs of a new token and an earlier one."""
    return num_new_tokens, num_new_tokens * (num_cached_tokens + num_new_tokens / 2)


def fit(points: Sequence[Point]) -> Costs:
    """Return the costs whose relative errors have the least squares; none is negative.

    `points` have the polynomial's quantities. Raises ValueError for none at all.
    """
    if not points:
        raise ValueError("costs cannot be fitted to no measurements")
    seconds = np.array([point.seconds for point in points])
    features = np.array([[1.0, point.first, point.second] for point in points]) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), np.finfo(float).tiny)
    used = np.ones(3, np.bool_)
    while True:
        found = np.zeros(3)
        found[used], *_ = np.linalg.lstsq(features[:, used] / scale[used], np.ones(len(points)), rcond=None)
        if (found >= 0).all():
            return Costs(*(found / scale).tolist())
        used[found.argmin()] = False
