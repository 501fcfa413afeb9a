"""The token budget of iterations that carry prompts (Sarathi-Serve, OSDI 2024, section 4.3).

Owns: the number of prompt tokens in the next iteration. Does not know: sequences, the clock, pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake.messages.costs import TBT_SLO_SHARE
from workers.decode.tbt_slo.tbt import IterationPredictors

_LONGEST_S = 0.25
"""The most predicted seconds of the prompt tokens in an iteration without a TBT SLO.

A prompt that arrives while the iteration runs waits for the iteration's end."""


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The limits of prompt tokens in one iteration."""

    least: int
    """The number of prompt tokens that is always allowed, so that prompts always progress: one page."""
    mixed: int
    """The most prompt tokens of an iteration that decodes sequences without a TBT SLO."""
    most: int
    """The most prompt tokens of any iteration, which is also the size of a prefill pass."""


def prompt_budget(
    limits: ChunkLimits, iteration_s: float | None, token_s: float | None, target_s: float
) -> int:
    """Return how many prompt tokens an iteration may carry beside the sequences that it decodes.

    The result is Sarathi-Serve's token budget (section 4.3), the optimal chunk size
    C* = (target - seconds of the iteration without prompts) / seconds of a prompt token. The target is a
    share of the SLO. Sarathi-Serve profiles a device once. Here the two durations are learned while the
    device serves.

    Args:
        limits: The limits of the result.
        iteration_s: Predicted seconds of the iteration without its prompts; None if unknown.
        token_s: The seconds that a prompt token adds; None if unknown.
        target_s: The most seconds of the iteration, a share of the strictest TBT SLO.

    Returns:
        The number of tokens; `limits.least` while the times are unknown.
    """
    least = min(limits.least, limits.most)
    if iteration_s is None or token_s is None:
        return least
    left_s = target_s - iteration_s
    if left_s <= 0.0:
        return least
    if left_s >= limits.most * token_s:
        return limits.most
    return max(least, int(left_s / token_s))


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

    def num_tokens(
        self, num_decoded: int, num_kv_tokens: int, tbt_slo_s: float | None, *, decodes: bool
    ) -> int:
        """Return the most prompt tokens of the next iteration.

        An SLO also limits an iteration that decodes nothing, because a sequence may arrive while it runs.
        Without an SLO the prompt tokens are limited to `_LONGEST_S`.

        Args:
            num_decoded: The number of sequences that wait for their next tokens.
            num_kv_tokens: The number of tokens of all these sequences together.
            tbt_slo_s: The strictest TBT SLO of these sequences, or of the prompts if there are no sequences;
                None if none of them has an SLO.
            decodes: Whether the iteration decodes any of these sequences, and not only prompts.

        Returns:
            The number of tokens. It is 0 for the first iterations that decode with an SLO, because the
            duration of iterations without prompts must be learned first.
        """
        token_s = self._predictors.prompt_cost.predict_s(1)
        if tbt_slo_s is None:
            most = min(self._limits.mixed, self._limits.most) if num_decoded else self._limits.most
            return min(most, prompt_budget(self._limits, 0.0, token_s, _LONGEST_S)) if token_s else most
        iteration_s = self._predictors.tbt.predict_s(num_decoded, num_kv_tokens) if num_decoded else 0.0
        if iteration_s is None and decodes:
            return 0
        return prompt_budget(self._limits, iteration_s, token_s, self._target_s(tbt_slo_s))

    def _target_s(self, tbt_slo_s: float) -> float:
        """Return the limit of an iteration's predicted seconds, with a margin for the prediction's error."""
        return min(TBT_SLO_SHARE, 1 / self._predictors.error.high_by_share) * tbt_slo_s


def divide_budget(budget: int, nums_left: Iterable[int]) -> list[int]:
    """Return the tokens of each prompt: each prompt gets all it can use of what earlier prompts leave."""
    chunks = []
    for num_left in nums_left:
        chunks.append(min(num_left, budget))
        budget -= chunks[-1]
    return chunks
