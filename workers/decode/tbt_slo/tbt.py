"""The predictors of decode iterations, which learn from measured iterations.

The predicted time is a linear function of batch size and KV tokens (Mooncake, section 3: the local
scheduler's double check), fitted by weighted least squares. Each iteration has `DECAY` times the weight of
the next iteration, so the function follows the machine's speed. A feature that has not varied lately gets the
slope 0, until it varies again. Prompts in an iteration add a cost of their own, a linear function of their
tokens and of the earlier tokens that these attend to.

Owns: the models of one device, whether a predicted TBT misses an SLO. Does not know: the clock, requests.
"""

import math
from typing import NamedTuple

from mooncake.messages.costs import batch_share, tbt_margin_s

DECAY = 0.995
"""The weight of an iteration relative to the next one. About 200 iterations count."""
PROMPT_DECAY = 0.95
"""The weight of an iteration with prompts relative to the next such iteration, for `PromptCost`.

About 20 iterations count. Fewer would say too little about the cost of positions. With more, the predictions
would follow too late when the machine becomes slower.
"""
ERROR_DECAY = 0.9
"""The weight of an iteration with prompts relative to the next such iteration, for `PredictionError`."""
MIN_ITERATIONS = 8
"""Measured iterations before the first prediction."""
MAX_MIXED_IN_A_ROW = 64
"""The number of consecutive iterations with prompts after which `tbt` learns from such iterations."""
_TOKENS_PER_UNIT = 1000.0
"""The number of KV tokens or pairs in one unit of the linear functions.

With this unit the features have similar sizes.
"""
_RIDGE = 0.01
"""A variance of a feature that is too small to learn from.

The features are requests, 1,000 KV tokens, and 1,000 pairs of a prompt token.
"""


class _Moments(NamedTuple):
    """Weighted sums of products of two deviations from the means.

    The deviations are those of requests (b), 1,000 KV tokens (k) and seconds (s).
    """

    bb: float = 0.0
    bk: float = 0.0
    kk: float = 0.0
    bs: float = 0.0
    ks: float = 0.0


class _PromptSums(NamedTuple):
    """Weighted sums over iterations with prompts.

    An iteration has n prompt tokens with m thousand pairs each (`PromptCost`), which add s seconds.
    """

    n: float = 0.0
    nm: float = 0.0
    nmm: float = 0.0
    s: float = 0.0
    ms: float = 0.0


class TBTPredictor:
    """A linear function of batch size and KV tokens that predicts the duration of an iteration."""

    def __init__(self) -> None:
        self._num_iterations = 0
        self._weight = 0.0
        self._mean_b = self._mean_k = self._mean_s = 0.0
        self._moments = _Moments()

    def observe(self, batch_size: int, num_kv_tokens: int, seconds: float) -> None:
        """Learn from one iteration of `batch_size` requests that took `seconds`."""
        self._num_iterations += 1
        self._weight = DECAY * self._weight + 1.0
        b = batch_size - self._mean_b
        k = num_kv_tokens / _TOKENS_PER_UNIT - self._mean_k
        s = seconds - self._mean_s
        self._mean_b += b / self._weight
        self._mean_k += k / self._weight
        self._mean_s += s / self._weight
        share = 1.0 - 1.0 / self._weight  # the share of a deviation that is left from the new mean
        old = self._moments
        self._moments = _Moments(
            DECAY * old.bb + share * b * b,
            DECAY * old.bk + share * b * k,
            DECAY * old.kk + share * k * k,
            DECAY * old.bs + share * b * s,
            DECAY * old.ks + share * k * s,
        )

    def predict_s(self, batch_size: int, num_kv_tokens: int) -> float | None:
        """Return the predicted seconds of an iteration; None while too little is known.

        `num_kv_tokens` counts the tokens of all `batch_size` requests together.
        """
        if self._num_iterations < MIN_ITERATIONS:
            return None
        request_s, unit_s = self._slopes()
        more_units = num_kv_tokens / _TOKENS_PER_UNIT - self._mean_k
        return max(0.0, self._mean_s + request_s * (batch_size - self._mean_b) + unit_s * more_units)

    def _slopes(self) -> tuple[float, float]:
        """Return the seconds of one more request and of 1,000 more KV tokens, neither negative."""
        weight, of = self._weight, self._moments
        bb, bk, kk = of.bb / weight + _RIDGE, of.bk / weight, of.kk / weight + _RIDGE
        bs, ks = of.bs / weight, of.ks / weight
        determinant = bb * kk - bk * bk  # above 0, because the ridge is
        request_s, unit_s = (bs * kk - ks * bk) / determinant, (ks * bb - bs * bk) / determinant
        if request_s >= 0 and unit_s >= 0:
            return request_s, unit_s
        return (
            0.0 if request_s < 0 else max(0.0, bs / bb),
            0.0 if unit_s < 0 else max(0.0, ks / kk),
        )


class PromptCost:
    """A linear function of tokens and pairs that predicts the seconds that prompts add to an iteration.

    A pair is a prompt token and an earlier token that it attends to (`mooncake.messages.costs`). The function
    has no constant. So the seconds for one prompt token are a linear function of the number of pairs for each
    token. This function is fitted. The weight of an iteration is its number of prompt tokens.
    """

    def __init__(self) -> None:
        self._sums = _PromptSums()

    def observe(self, num_tokens: int, num_pairs: float, added_s: float) -> None:
        """Record that prompts with these tokens and pairs made an iteration `added_s` seconds longer."""
        m, s = num_pairs / (num_tokens * _TOKENS_PER_UNIT), max(0.0, added_s)
        new = (num_tokens, num_tokens * m, num_tokens * m * m, s, m * s)
        self._sums = _PromptSums(*(PROMPT_DECAY * a + b for a, b in zip(self._sums, new, strict=True)))

    @property
    def is_known(self) -> bool:
        """Whether an iteration has been observed."""
        return self._sums.n > 0

    def predict_s(self, num_tokens: float, num_pairs: float) -> float | None:
        """Return the seconds that these tokens and pairs add; None before the first observation."""
        if not self.is_known:
            return None
        token_s, pair_s = self._slopes()
        return num_tokens * token_s + num_pairs * pair_s

    def num_tokens_in(self, seconds: float, start: int) -> float:
        """Return how many tokens from position `start` on add `seconds`: the inverse of `predict_s`.

        The result is 0 without time. Otherwise it is infinite if tokens cost nothing, and before the first
        observation.
        """
        if seconds <= 0.0:
            return 0.0
        if not self.is_known:
            return math.inf
        token_s, pair_s = self._slopes()
        first_s = token_s + pair_s * start
        divisor = first_s + math.sqrt(first_s * first_s + 2 * pair_s * seconds)
        return 2 * seconds / divisor if divisor else math.inf

    def _slopes(self) -> tuple[float, float]:
        """Return the seconds that one more token adds, and one more pair; neither is negative."""
        n, nm, nmm, s, ms = self._sums
        mean_m, mean_s = nm / n, s / n
        unit_s = (ms / n - mean_m * mean_s) / (nmm / n - mean_m * mean_m + _RIDGE)
        unit_s = min(max(0.0, unit_s), mean_s / mean_m)
        return max(0.0, mean_s - unit_s * mean_m), unit_s / _TOKENS_PER_UNIT


class PredictionError:
    """The mean relative error of predictions for iterations with prompts. Recent iterations weigh more."""

    def __init__(self) -> None:
        self._share = 0.0

    def observe(self, predicted_s: float, seconds: float) -> None:
        """Record that an iteration predicted to take `predicted_s` seconds took `seconds`."""
        if predicted_s > 0:
            self._share += (1 - ERROR_DECAY) * (min(abs(seconds / predicted_s - 1), 1.0) - self._share)

    @property
    def high_by_share(self) -> float:
        """The ratio of actual to predicted seconds of a slow iteration: 1 plus two mean errors."""
        return 1 + 2 * self._share


class TooSlow(NamedTuple):
    """A predicted TBT that exceeds a TBT SLO, or comes closer to the SLO than the margin, in seconds."""

    tbt_s: float
    margin_s: float


class IterationPredictors:
    """The predictors of one instance's iterations."""

    def __init__(self) -> None:
        self.tbt = TBTPredictor()
        self.prompt_cost = PromptCost()
        self.error = PredictionError()
        self._num_mixed_in_a_row = 0
        """Iterations with decoded sequences and prompts since the last iteration without prompts."""

    def observe(
        self,
        num_decoded: int,
        num_kv_tokens: int,
        num_prompt_tokens: int,
        num_prompt_pairs: float,
        seconds: float,
    ) -> None:
        """Learn from one measured iteration.

        `tbt` learns from iterations without prompts, and `prompt_cost` from iterations with prompts. After
        iterations that computed prompts alone, `prompt_cost` includes a part of an iteration's constant time;
        subtracting this cost from an iteration with prompts would make the predictions of `tbt` too small. So
        `tbt` learns from iterations with prompts only after `MAX_MIXED_IN_A_ROW` such iterations in a row.

        Args:
            num_decoded: The number of sequences that were decoded.
            num_kv_tokens: The number of tokens of all these sequences together.
            num_prompt_tokens: The number of prompt tokens that were computed.
            num_prompt_pairs: The number of pairs (prompt token, earlier token that it attends to).
            seconds: The duration.
        """
        if not num_prompt_tokens:
            self._num_mixed_in_a_row = 0
            self.tbt.observe(num_decoded, num_kv_tokens, seconds)
            return
        decoding_s = self.tbt.predict_s(num_decoded, num_kv_tokens) if num_decoded else 0.0
        added_s = self.prompt_cost.predict_s(num_prompt_tokens, num_prompt_pairs)
        if decoding_s is not None and added_s is not None:
            self.error.observe(decoding_s + added_s, seconds)
        if num_decoded:
            self._num_mixed_in_a_row += 1
            if self._num_mixed_in_a_row > MAX_MIXED_IN_A_ROW and added_s is not None:
                self.tbt.observe(num_decoded, num_kv_tokens, max(0.0, seconds - added_s))
        self.prompt_cost.observe(num_prompt_tokens, num_prompt_pairs, seconds - (decoding_s or 0.0))

    def batch_tbt_s(self, num_requests: int, num_kv_tokens: int, max_batch: int) -> float | None:
        """Return the predicted seconds of TBT of requests that share a batch of at most `max_batch`.

        `num_kv_tokens` counts the tokens of all `num_requests` requests together. Returns None without a
        prediction.
        """
        batched, delay = batch_share(num_requests, max_batch)
        iteration_s = self.tbt.predict_s(round(batched * num_requests), round(batched * num_kv_tokens))
        return None if iteration_s is None else delay * iteration_s

    def too_slow(
        self, num_requests: int, num_kv_tokens: int, max_batch: int, tbt_slo_s: float
    ) -> TooSlow | None:
        """Return the predicted TBT of requests that would miss the TBT SLO.

        Returns None if they would meet the SLO with a margin, and without a prediction. The first arguments
        are those of `batch_tbt_s`.
        """
        empty_s = self.tbt.predict_s(0, 0)
        tbt_s = self.batch_tbt_s(num_requests, num_kv_tokens, max_batch)
        if empty_s is None or tbt_s is None:
            return None
        margin_s = tbt_margin_s(tbt_s, empty_s)
        return None if tbt_s + margin_s <= tbt_slo_s else TooSlow(tbt_s, margin_s)
