"""The token budget of iterations that carry prompts (Sarathi-Serve, OSDI 2024, section 4.3).

A token costs more the later its position is, because it attends to all tokens before it. So the budget is a
time, and chunks get smaller from one iteration of a prompt to the next.

Owns: the seconds and tokens of prompts in the next iteration. Does not know: sequences, the clock, pages.
"""

from dataclasses import dataclass

from mooncake.messages.costs import TBT_SLO_SHARE, prefill_quantities
from workers.decode.tbt_slo.tbt import IterationPredictors, PromptCost

_LONGEST_S = 0.25
"""The most predicted seconds of the prompt tokens in an iteration without a TBT SLO.

A prompt that arrives while the iteration runs waits for the iteration's end.
"""


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The limits of prompt tokens in one iteration."""

    least: int
    """The number of prompt tokens that is always allowed, so that prompts always progress: one page."""
    mixed: int
    """The most prompt tokens of an iteration that decodes sequences without a TBT SLO."""
    most: int
    """The most prompt tokens of any iteration, which is also the size of a prefill pass."""


@dataclass(slots=True)
class Allowance:
    """The seconds and tokens that prompts may still add to one iteration."""

    cost: PromptCost
    left_s: float
    """The seconds for prompt tokens."""
    most: int
    """The most prompt tokens, however short they take."""
    least: int
    """The number of prompt tokens that is allowed however long they take; at most `most`."""

    def take(self, start: int, num_tokens: int) -> int:
        """Take the next chunk of a prompt whose next `num_tokens` tokens begin at position `start`.

        The result is Sarathi-Serve's token budget (section 4.3), the optimal chunk size
        C* = (target - seconds of the iteration without prompts) / seconds of a prompt token. The dividend is
        what earlier chunks leave of `left_s`, and the divisor depends on the position.

        Returns:
            The number of tokens in the chunk; 0 if nothing is left.
        """
        fitting = min(self.cost.num_tokens_in(self.left_s, start), num_tokens, self.most)
        chunk = max(int(fitting), min(num_tokens, self.least))
        self.spend(start, chunk)
        return chunk

    def spend(self, start: int, num_tokens: int) -> None:
        """Subtract a chunk that the iteration carries, whether it is allowed or not."""
        self.left_s -= self.cost.predict_s(*prefill_quantities(num_tokens, start)) or 0.0
        self.most = max(0, self.most - num_tokens)
        self.least = max(0, self.least - num_tokens)


class PromptBudget:
    """The prompt tokens of one instance's iterations; `predictors` predict iteration times."""

    def __init__(self, predictors: IterationPredictors, limits: ChunkLimits) -> None:
        self._predictors, self._limits = predictors, limits

    @property
    def most(self) -> int:
        """The largest number of prompt tokens of any iteration."""
        return self._limits.most

    @property
    def mixed(self) -> int:
        """The most prompt tokens of an iteration that decodes sequences without a TBT SLO."""
        return self._limits.mixed

    def allowance(
        self, num_decoded: int, num_kv_tokens: int, tbt_slo_s: float | None, *, decodes: bool
    ) -> Allowance:
        """Return what prompts may add to the next iteration.

        With an SLO, the iteration's target is a share of the SLO, and prompts get the time that the predicted
        iteration without prompts leaves. Sarathi-Serve profiles a device once. Here the durations are learned
        while the device serves. An SLO also limits an iteration that decodes nothing, because a sequence may
        arrive while it runs. Without an SLO the prompt tokens are limited to `_LONGEST_S`.

        Args:
            num_decoded: The number of sequences that wait for their next tokens.
            num_kv_tokens: The number of tokens of all these sequences together.
            tbt_slo_s: The strictest TBT SLO of these sequences, or of the prompts if there are no sequences;
                None if none of them has an SLO.
            decodes: Whether the iteration decodes any of these sequences, and not only prompts.

        Returns:
            The allowance. It has no tokens for the first iterations that decode with an SLO, because the
            duration of iterations without prompts must be learned first. It has only the least number of
            tokens for other iterations while a duration is unknown.
        """
        cost, limits = self._predictors.prompt_cost, self._limits
        if tbt_slo_s is None:
            most = min(limits.mixed, limits.most) if num_decoded else limits.most
            return Allowance(cost, _LONGEST_S, most, min(limits.least, most))
        least = min(limits.least, limits.most)
        iteration_s = self._predictors.tbt.predict_s(num_decoded, num_kv_tokens) if num_decoded else 0.0
        if iteration_s is None:
            return Allowance(cost, 0.0, 0, 0) if decodes else Allowance(cost, 0.0, least, least)
        most = limits.most if cost.is_known else least
        return Allowance(cost, self._target_s(tbt_slo_s) - iteration_s, most, least)

    def _target_s(self, tbt_slo_s: float) -> float:
        """Return the limit of an iteration's predicted seconds, with a margin for the prediction's error."""
        return min(TBT_SLO_SHARE, 1 / self._predictors.error.high_by_share) * tbt_slo_s
