"""The double check in the simulator: whether a request that joins a batch would miss its TBT SLO.

The rule is that of `workers.decode.tbt_slo.double_check`, which cannot be used without torch.

Owns: the predicted TBT of a batch, and whether it is too long. Does not know: which requests wait or are
refused.
"""

from mooncake.messages.costs import batch_share, tbt_margin_s
from workers.decode.tbt_slo.tbt import IterationPredictors


class DoubleCheck:
    """The double check of an instance that decodes at most `max_batch` requests together."""

    def __init__(self, predictors: IterationPredictors, max_batch: int) -> None:
        self._predictors, self._max_batch = predictors, max_batch

    def tbt_s(self, num_requests: int, num_kv_tokens: int) -> float | None:
        """Return the predicted TBT, in seconds, of requests that share the batch; None if there is no
        prediction yet."""
        batched, delay = batch_share(num_requests, self._max_batch)
        iteration_s = self._predictors.tbt.predict_s(
            round(batched * num_requests), round(batched * num_kv_tokens)
        )
        return None if iteration_s is None else delay * iteration_s

    def too_slow_s(self, slo_s: float | None, num_others: int, num_kv_tokens: int) -> float | None:
        """Return the predicted TBT of a request beside others if it exceeds the SLO `slo_s`, else None.

        If `slo_s` is None there is no limit.
        """
        if slo_s is None or not num_others:
            return None
        empty_s = self._predictors.tbt.predict_s(0, 0)
        predicted_s = self.tbt_s(num_others + 1, num_kv_tokens)
        if empty_s is None or predicted_s is None:
            return None
        margin_s = tbt_margin_s(predicted_s, empty_s)
        return None if predicted_s + margin_s <= slo_s else predicted_s
