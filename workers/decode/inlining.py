"""Inlined prefill: decode iterations carry chunks of prompts (coupled chunked prefill).

The Conductor orders which prompts a decode instance computes itself. Their chunks share iterations with the
sequences that are decoded, and are as long as the strictest TBT SLO of these allows (Sarathi-Serve, OSDI
2024, section 4).

Owns: how many tokens of each sequence the next iteration computes, and which sequences share it. Does not
know: the clock, pools, pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake.messages.costs import TBT_SLO_SHARE
from workers.decode.iterations import PlannedChunk
from workers.decode.meter import DecodeMeter
from workers.decode.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Limits of the prompt tokens in one iteration."""

    least: int
    """Tokens that an iteration carries in any case, so that prompts always progress: a page."""
    mixed: int
    """Most tokens beside sequences that are decoded and have no TBT SLO."""
    most: int
    """Most tokens of any iteration: those of a prefill pass."""


def prompt_budget(
    limits: ChunkLimits, iteration_s: float | None, token_s: float | None, target_s: float | None
) -> int:
    """Return how many prompt tokens an iteration may carry beside sequences that are decoded.

    This is Sarathi-Serve's token budget (section 4.3), the optimal chunk size C*: the tokens whose
    computation fills what the target time leaves of an iteration. Sarathi-Serve profiles a device once; here
    both terms are learned while it serves, so C* = (target - iteration without prompts) / prompt token, with
    the target a share of the SLO.

    Args:
        limits: The limits of the result.
        iteration_s: The predicted iteration without prompts: overhead and B decoded sequences. None: unknown.
        token_s: The seconds that a prompt token adds. None: unknown.
        target_s: The most seconds of the iteration, a share of the strictest TBT SLO. None: no limit.

    Returns:
        The tokens. Without a target `limits.mixed`; while the times are unknown `limits.least`.
    """
    if target_s is None:
        return min(limits.mixed, limits.most)
    least = min(limits.least, limits.most)
    if iteration_s is None or token_s is None:
        return least
    left_s = target_s - iteration_s
    if left_s <= 0.0:
        return least
    if left_s >= limits.most * token_s:
        return limits.most
    return max(least, int(left_s / token_s))


def divide_budget(budget: int, nums_left: Iterable[int]) -> list[int]:
    """Return the tokens of each prompt: the first gets all that it can use, the next what is left."""
    chunks = []
    for num_left in nums_left:
        chunks.append(min(num_left, budget))
        budget -= chunks[-1]
    return chunks


class PromptChunks:
    """The chunks of one batch's iterations; `meter` predicts their times."""

    def __init__(self, meter: DecodeMeter, limits: ChunkLimits) -> None:
        self._meter, self._limits = meter, limits

    def plan(self, ready: list[Sequence]) -> list[PlannedChunk]:
        """Return the next iteration of these sequences, which are in the batch's order."""
        sharing = _sharing(ready)
        prompts = [sequence for sequence in sharing if sequence.num_tokens_to_plan]
        decoded = [sequence for sequence in ready if not sequence.num_tokens_to_plan]
        budget = self._budget(decoded, prompts) if prompts and not self._must_learn(sharing) else 0
        of_prompts = divide_budget(budget, [sequence.num_tokens_to_plan for sequence in prompts])
        num_tokens = dict(zip(prompts, of_prompts, strict=True))
        planned = [
            PlannedChunk(sequence, num_tokens.get(sequence, 1), of_prompt=sequence in num_tokens)
            for sequence in sharing
        ]
        return [chunk for chunk in planned if chunk.num_tokens]

    def _must_learn(self, sharing: list[Sequence]) -> bool:
        """Return whether an iteration of these sequences is to show what decoding takes, without prompts.

        An SLO needs that, and mixed iterations do not show it. The first few of a session are enough.
        """
        decoded = [sequence for sequence in sharing if not sequence.num_tokens_to_plan]
        has_slo = any(sequence.tbt_slo_s is not None for sequence in decoded)
        return has_slo and self._meter.tbt.predict_s(0, 0) is None

    def _budget(self, decoded: list[Sequence], prompts: list[Sequence]) -> int:
        """Return the prompt tokens of an iteration while the decoded sequences wait for their next tokens.

        With an SLO an iteration is not longer if none waits: one may come while the iteration runs.
        """
        slos_s = [sequence.tbt_slo_s for sequence in decoded or prompts if sequence.tbt_slo_s is not None]
        if not decoded and not slos_s:
            return self._limits.most
        num_kv_tokens = sum(len(sequence.tokens) for sequence in decoded)
        return prompt_budget(
            self._limits,
            self._meter.tbt.predict_s(len(decoded), num_kv_tokens) if decoded else 0.0,
            self._meter.prompt_cost.predict_s(1),
            self._target_s(min(slos_s)) if slos_s else None,
        )

    def _target_s(self, tbt_slo_s: float) -> float:
        """Return the most predicted seconds of an iteration: one that takes long keeps the SLO too."""
        return min(TBT_SLO_SHARE, 1 / self._meter.error.high_by_share) * tbt_slo_s


def _sharing(ready: list[Sequence]) -> list[Sequence]:
    """Return the sequences of the next iteration: one that must be alone, or all others."""
    for sequence in ready:
        if sequence.must_be_alone and not sequence.is_in_flight:
            return [sequence]
    return [sequence for sequence in ready if not sequence.must_be_alone]
