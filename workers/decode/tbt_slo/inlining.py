"""Inlined prefill: decode iterations carry chunks of prompts (coupled chunked prefill).

The Conductor orders which prompts a decode instance computes itself. Their chunks share iterations with the
sequences that are decoded, and are as long as the strictest TBT SLO of these allows (Sarathi-Serve, OSDI
2024, section 4). The tokens that a migrated request lacks are computed like those of a prompt, but first and
outside the budget: they are few, and a client waits for the next token.

Owns: the tokens of each sequence in the next iteration, and which sequences share it. Does not know: how
many tokens of prompts are too many, the clock, pools, pages.
"""

from workers.decode.batching.iterations import PlannedChunk
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.prompt_budget import PromptBudget, divide_budget


class PromptChunks:
    """The planner of prompt chunks in one batch's iterations."""

    def __init__(self, budget: PromptBudget) -> None:
        self._budget = budget

    def plan(self, ready: list[Sequence], turn: list[Sequence]) -> list[PlannedChunk]:
        """Return the chunks of the next iteration of the sequences in `turn`, in the batch's order.

        They are `ready`, or some of these: then the others are in an iteration beside it.
        """
        sharing = _sharing(turn)
        moved = [sequence for sequence in sharing if sequence.num_tokens_to_plan and not sequence.is_inlined]
        prompts = [sequence for sequence in sharing if sequence.num_tokens_to_plan and sequence.is_inlined]
        num_tokens = _divided(self._budget.most, moved)
        if prompts:
            budget = self._num_tokens(ready, sharing, prompts) - sum(num_tokens.values())
            num_tokens |= _divided(max(0, budget), prompts)
        planned = [
            PlannedChunk(sequence, num_tokens.get(sequence, 1), of_prompt=sequence in num_tokens)
            for sequence in sharing
        ]
        return [chunk for chunk in planned if chunk.num_tokens]

    def _num_tokens(self, ready: list[Sequence], sharing: list[Sequence], prompts: list[Sequence]) -> int:
        """Return the number of tokens of `prompts` in an iteration with the sequences `sharing`."""
        decoded = [
            sequence for sequence in ready if not (sequence.num_tokens_to_plan and sequence.is_inlined)
        ]
        slos_s = [sequence.tbt_slo_s for sequence in decoded or prompts if sequence.tbt_slo_s is not None]
        return self._budget.num_tokens(
            len(decoded),
            sum(len(sequence.tokens) for sequence in decoded),
            min(slos_s, default=None),
            decodes=len(prompts) < len(sharing),
        )


def _divided(budget: int, sequences: list[Sequence]) -> dict[Sequence, int]:
    chunks = divide_budget(budget, [sequence.num_tokens_to_plan for sequence in sequences])
    return dict(zip(sequences, chunks, strict=True))


def _sharing(ready: list[Sequence]) -> list[Sequence]:
    """Return the sequences that may share the next iteration: one that must be alone, or all others."""
    for sequence in ready:
        if sequence.must_be_alone and not sequence.is_in_flight:
            return [sequence]
    return [sequence for sequence in ready if not sequence.must_be_alone]
