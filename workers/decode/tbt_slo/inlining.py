"""Inlined prefill: decode iterations carry chunks of prompts (coupled chunked prefill).

The Conductor orders which prompts a decode instance computes itself. Their chunks share iterations with the
sequences that are being decoded. The strictest TBT SLO of these sequences limits the chunks (Sarathi-Serve,
OSDI 2024, section 4). If a migrated request's KVCache lacks tokens, these tokens are computed like those of a
prompt, but before the prompts: they are few, and a client waits for the next token.

Prompts of one priority take turns between tenants and answers, like the prompts at prefill instances. If a
tenant's prompts have more than four times the tokens of the first prompt's tenant, an iteration leaves them
out. So the first prompt has short iterations. If a prompt is left out, prompts with a higher priority number
are left out too.

Owns: the tokens of each sequence in the next iteration, and which sequences share it. Does not know: the
limits of prompt tokens, the clock, pools, pages.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mooncake.messages.requests import Flow
from workers.decode.batching.iterations import PlannedChunk
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.prompt_budget import Allowance, PromptBudget
from workers.execution.fair_order import FairOrder

_MAX_TENANT_RATIO = 4
"""The largest ratio of a tenant's prompt tokens to the prompt tokens of the first prompt's tenant.

A tenant above this ratio has no prompt in the iteration.
"""


@dataclass(slots=True, eq=False)
class _Prompt:
    """An inlined prompt with tokens that are still to be planned."""

    sequence: Sequence
    flow: Flow
    charged: int
    """The position up to which tokens have been charged to the tenant: their iterations have begun."""
    start: float = 0.0
    """The prompt's start in the tenant's virtual time (`FairOrder`)."""

    @property
    def num_expected(self) -> int:
        """The number of tokens that are still to be planned."""
        return self.sequence.num_tokens_to_plan


class _PromptOrder:
    """The order of inlined prompts. `lead_tokens` is as in `FairOrder`."""

    def __init__(self, lead_tokens: int) -> None:
        self._fair_order = FairOrder(lead_tokens)
        self._prompts: dict[Sequence, _Prompt] = {}

    def in_turn(self, ready: Iterable[Sequence], sharing: Iterable[Sequence]) -> list[Sequence]:
        """Return the prompts among `sharing` that the next iteration computes, in order.

        `ready` has all sequences, in the batch's order.
        """
        self._follow([sequence for sequence in ready if sequence.is_inlined and sequence.num_tokens_to_plan])
        prompts = [self._prompts[sequence] for sequence in sharing if sequence in self._prompts]
        by_priority: defaultdict[int, list[_Prompt]] = defaultdict(list)
        for prompt in prompts:
            by_priority[prompt.sequence.request.priority].append(prompt)
        turns = {priority: iter(self._fair_order.ordered(equals)) for priority, equals in by_priority.items()}
        ordered = [next(turns[prompt.sequence.request.priority]) for prompt in prompts]
        return self._together(ordered)

    def _together(self, ordered: list[_Prompt]) -> list[Sequence]:
        """Return the first prompt, and the prompts that share an iteration with it."""
        num_tokens: Counter[str] = Counter()
        for prompt in self._prompts.values():
            num_tokens[prompt.flow.tenant] += prompt.sequence.num_tokens_to_plan
        together, last_priority = list[Sequence](), math.inf
        for prompt in ordered:
            tenant, priority = prompt.flow.tenant, prompt.sequence.request.priority
            if num_tokens[tenant] > _MAX_TENANT_RATIO * num_tokens[ordered[0].flow.tenant]:
                last_priority = min(last_priority, priority)
            elif priority <= last_priority:
                together.append(prompt.sequence)
        return together

    def _follow(self, waiting: list[Sequence]) -> None:
        """Charge tokens to their tenants, forget the prompts that are not in `waiting`, and add the new ones.

        A token is charged when its iteration has begun, because a plan can be taken back until then. If
        planned tokens were charged, their prompts would seem to need nothing more, and would go before a
        shorter prompt that has come meanwhile.
        """
        for sequence, prompt in self._prompts.items():
            begun = min(sequence.next_start, len(sequence.request.token_ids))
            if begun > prompt.charged:
                self._fair_order.computed(prompt, begun - prompt.charged)
                prompt.charged = begun
        for gone in self._prompts.keys() - set(waiting):
            self._fair_order.leave(self._prompts.pop(gone))
        for sequence in waiting:
            if sequence not in self._prompts:
                prompt = _Prompt(sequence, sequence.request.flow, sequence.next_start)
                self._prompts[sequence] = prompt
                self._fair_order.enter(prompt)


class PromptChunks:
    """The planner of prompt chunks in one batch's iterations."""

    def __init__(self, budget: PromptBudget) -> None:
        self._budget = budget
        self._order = _PromptOrder(budget.mixed)

    def plan(self, ready: list[Sequence], turn: list[Sequence]) -> list[PlannedChunk]:
        """Return the chunks of the next iteration of the sequences in `turn`, in the batch's order.

        `turn` has all sequences of `ready`, or only some of them while an iteration waits for a helper.
        """
        sharing = _sharing(turn)
        moved = [sequence for sequence in sharing if sequence.num_tokens_to_plan and not sequence.is_inlined]
        prompts = [sequence for sequence in sharing if sequence.num_tokens_to_plan and sequence.is_inlined]
        num_tokens, most = dict.fromkeys(prompts, 0), self._budget.most
        for sequence in moved:
            num_tokens[sequence] = min(sequence.num_tokens_to_plan, most)
            most -= num_tokens[sequence]
        if prompts:
            allowance = self._allowance(ready, sharing, prompts)
            for sequence in moved:
                allowance.spend(sequence.next_start, num_tokens[sequence])
            for sequence in self._order.in_turn(ready, sharing):
                num_tokens[sequence] = allowance.take(sequence.next_start, sequence.num_tokens_to_plan)
        planned = [
            PlannedChunk(sequence, num_tokens.get(sequence, 1), of_prompt=sequence in num_tokens)
            for sequence in sharing
        ]
        return [chunk for chunk in planned if chunk.num_tokens]

    def _allowance(
        self, ready: list[Sequence], sharing: list[Sequence], prompts: list[Sequence]
    ) -> Allowance:
        """Return what `prompts` may add to an iteration with the sequences `sharing`."""
        decoded = [
            sequence for sequence in ready if not (sequence.num_tokens_to_plan and sequence.is_inlined)
        ]
        slos_s = [sequence.tbt_slo_s for sequence in decoded or prompts if sequence.tbt_slo_s is not None]
        return self._budget.allowance(
            len(decoded),
            sum(len(sequence.tokens) for sequence in decoded),
            min(slos_s, default=None),
            decodes=len(prompts) < len(sharing),
        )


def _sharing(ready: list[Sequence]) -> list[Sequence]:
    """Return the sequences of the next iteration: one that must be alone, or all that can share it."""
    for sequence in ready:
        if sequence.must_be_alone and not sequence.is_in_flight:
            return [sequence]
    return [sequence for sequence in ready if not sequence.must_be_alone]
