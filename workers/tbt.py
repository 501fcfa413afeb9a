"""How long an iteration of decoding will take: learned from those that were measured.

A line in batch size and KV tokens (Mooncake, section 3: the local scheduler's double check), by weighted
least squares. An iteration counts `DECAY` times as much as the one after it, so the line follows the
machine. What has not varied lately is taken to cost nothing more: it will be measured as soon as it varies.

Owns: the model of one device. Does not know: the clock, requests, limits.
"""

import numpy as np

DECAY = 0.995
MIN_ITERATIONS = 8
"""before it says anything"""
_TOKENS_PER_UNIT = 1000.0
_RIDGE = 0.01
"""variance of a feature, in requests or 1,000 tokens, squared, that tells about as much as nothing"""


class TBTPredictor:
    """Time between tokens: of the next one of everybody in the batch."""

    def __init__(self) -> None:
        self._num_iterations = 0
        self._weight = 0.0
        self._mean = np.zeros(3)
        """of requests, 1,000 KV tokens, seconds"""
        self._moment = np.zeros((3, 3))
        """weighted sum of products of deviations from the mean"""

    def observe(self, batch_size: int, num_kv_tokens: int, seconds: float) -> None:
        """One iteration has been measured."""
        self._num_iterations += 1
        point = np.array([batch_size, num_kv_tokens / _TOKENS_PER_UNIT, seconds])
        self._weight = DECAY * self._weight + 1.0
        deviation = point - self._mean
        self._mean = self._mean + deviation / self._weight
        self._moment = DECAY * self._moment + np.outer(deviation, point - self._mean)

    def predict_s(self, batch_size: int, num_kv_tokens: int) -> float | None:
        """Seconds of an iteration over so many requests of so many tokens in all; None while too little is
        known."""
        if self._num_iterations < MIN_ITERATIONS:
            return None
        point = np.array([batch_size, num_kv_tokens / _TOKENS_PER_UNIT])
        seconds = self._mean[2] + self._slopes() @ (point - self._mean[:2])
        return max(0.0, float(seconds))

    def _slopes(self) -> np.ndarray:
        """Seconds for each more request and each 1,000 more tokens; neither makes an iteration shorter."""
        covariance = self._moment[:2, :2] / self._weight + _RIDGE * np.eye(2)
        with_seconds = self._moment[:2, 2] / self._weight
        slopes = np.linalg.solve(covariance, with_seconds)
        if (slopes >= 0).all():
            return slopes
        alone = np.maximum(0.0, with_seconds / np.diag(covariance))
        return np.where(slopes < 0, 0.0, alone)
