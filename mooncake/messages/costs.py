"""The costs of prefill and decode: polynomials with three coefficients (Mooncake, section 6.1).

    prefill of n new tokens behind c cached ones     constant + n * token + n * (c + n / 2) * pair
    iteration of b requests with k KV tokens in all  constant + b * request + k * token

Owns: these forms, and their fit to measurements. Does not know: how they are measured and used.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

TBT_SLO_SHARE = 0.8
"""The largest share of a TBT SLO that a predicted iteration may take.

Prompt tokens or a pause that are added to the iteration count too.
"""
TBT_MARGIN = 0.1
"""The margin that predictions keep below a TBT SLO.

It is a share of the time that the requests in a batch add to an iteration.
"""
TBT_SHARE = 0.1
"""The share of gaps that count as a request's longest.

TBT is the mean of the longest gaps (Mooncake, FAST'25, section 5.1).
"""

_WAIT_DEVIATIONS = 2.0
"""Standard deviations that are added to the mean in the prediction of a wait for a batch slot."""
_HUBER_DEVIATIONS = 1.345
"""Standard deviations up to which an error counts by its square.

With this usual value, and normal errors, the fit is 95% as exact as least squares.
"""
_MEDIAN_TO_DEVIATION = 1.4826
"""The standard deviation of normal errors, as a multiple of the median of their absolute values."""
_LEAST_DEVIATION = 0.005
"""The least standard deviation of relative errors; a better fit is taken to be chance."""
_MAX_ROUNDS = 100
_CONVERGED = 1e-6
"""The relative change of the costs below which the fit ends."""

HOLD_SHARE = 0.9
"""The longest wait of a first token at the double check, as a share of the time until the token is due.

The rest of the time is for its way to the client.
"""


def tbt_s(gaps_s: Sequence[float]) -> float | None:
    """Return the TBT of one request in seconds: the mean of the longest `TBT_SHARE` of its gaps.

    `gaps_s` are the seconds between the request's iterations. Returns None without gaps.
    """
    if not gaps_s:
        return None
    longest = sorted(gaps_s)[-math.ceil(TBT_SHARE * len(gaps_s)) :]
    return sum(longest) / len(longest)


def tbt_margin_s(iteration_s: float, empty_iteration_s: float) -> float:
    """Return the seconds by which a predicted iteration must stay below a TBT SLO.

    An iteration is predicted as a mean. The TBT of a request is the mean of its longest gaps, and the gap
    before its second token contains the transfer of its KVCache. The time of an iteration without a batch is
    known well, so no margin is kept for that part.
    """
    return TBT_MARGIN * max(0.0, iteration_s - empty_iteration_s)


class BatchShare(NamedTuple):
    """The service of requests by a batch that may have fewer slots than there are requests."""

    batched: float
    """The share of the requests that are in the batch at a time, from 0 to 1."""
    delay: float
    """The TBT of a request, in iterations of the batch."""


def batch_share(num_requests: float, max_batch: float) -> BatchShare:
    """Return how `num_requests` requests share a batch of at most `max_batch`.

    With r requests and s < r slots, the last request has its first token and then waits until k = r - s
    others have left. In the time that one request takes to decode, s requests leave, at random moments. So
    the wait is k / s of this time, with two standard deviations (k + 2 * sqrt(k)) / s. The wait is a single
    gap, but the longest. TBT is the mean of the longest tenth of the gaps, so the wait adds ten times as many
    iterations to TBT as to the mean of all gaps.
    """
    if num_requests <= max_batch:
        return BatchShare(1.0, 1.0)
    num_ahead = num_requests - max_batch
    wait = (num_ahead + _WAIT_DEVIATIONS * math.sqrt(num_ahead)) / max_batch
    return BatchShare(max_batch / num_requests, 1.0 + wait / TBT_SHARE)


class Costs(NamedTuple):
    """The coefficients of a cost in seconds: a constant, and what a unit of each of two quantities adds.

    The quantities of a prefill are tokens, and pairs of a token and an earlier token; of an iteration,
    requests and KV tokens.
    """

    constant_s: float
    first_s: float
    second_s: float

    def seconds(self, first: float, second: float) -> float:
        """Return the seconds for two quantities: tokens and token pairs, or requests and KV tokens."""
        return self.constant_s + first * self.first_s + second * self.second_s


class ModelShape(msgspec.Struct, frozen=True):
    """The sizes of a model that decide the amount of computation."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


class Point(NamedTuple):
    """A measured duration with two quantities.

    As measured, they are new and cached tokens of a prefill, or requests and KV tokens of an iteration.
    """

    first: float
    second: float
    seconds: float


def prefill_quantities(num_new_tokens: float, num_cached_tokens: float) -> tuple[float, float]:
    """Return the number of new tokens, and of pairs of a new token and an earlier one."""
    return num_new_tokens, num_new_tokens * (num_cached_tokens + num_new_tokens / 2)


def fit(points: Sequence[Point]) -> Costs:
    """Return the costs whose relative errors have the least Huber loss; none is negative.

    Errors of more than `_HUBER_DEVIATIONS` standard deviations count in proportion to their size rather than
    to its square, so single durations that something else made longer hardly move the costs. The loss is
    minimized by least squares whose weights follow the errors. The standard deviation is estimated from the
    median of the absolute errors. Raises ValueError without any points.

    The quantities of `points` are those of `Costs`: for prefills, the results of `prefill_quantities`.
    """
    if not points:
        raise ValueError("costs cannot be fitted to no measurements")
    seconds = np.array([point.seconds for point in points])
    features = np.array([[1.0, point.first, point.second] for point in points]) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), np.finfo(float).tiny)
    features /= scale
    found = _least_squares(features, np.ones(len(points)))
    for _ in range(_MAX_ROUNDS):
        errors = np.abs(features @ found - 1.0)
        deviation = max(_MEDIAN_TO_DEVIATION * float(np.median(errors)), _LEAST_DEVIATION)
        weights = _HUBER_DEVIATIONS * deviation / np.maximum(errors, _HUBER_DEVIATIONS * deviation)
        before, found = found, _least_squares(features, weights)
        if np.allclose(found, before, rtol=_CONVERGED, atol=0.0):
            break
    return Costs(*(found / scale).tolist())


def _least_squares(features: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a factor for each of the three columns of `features`, none negative: float64 `[3]`.

    With these factors the sums of the rows are nearest to 1 (least squares). `weights` has the weight of each
    row's squared error.
    """
    roots = np.sqrt(weights)
    used = np.ones(3, np.bool_)
    while True:
        found = np.zeros(3)
        found[used], *_ = np.linalg.lstsq(features[:, used] * roots[:, None], roots, rcond=None)
        if (found >= 0).all():
            return found
        used[found.argmin()] = False
