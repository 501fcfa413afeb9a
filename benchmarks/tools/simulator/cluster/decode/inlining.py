"""Prompts that a simulated decode instance computes itself, in iterations of its batch.

The number of prompt tokens of an iteration follows the server's own rule and predictors (`workers.decode`).

Owns: these prompts and their next chunks. Does not know: the clock, pools, what is done with a computed
prompt.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.batch import Batch, Member
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.messages.costs import prefill_quantities
from mooncake.messages.heartbeats import MixedIterations
from workers.decode.tbt_slo.prompt_budget import ChunkLimits, PromptBudget
from workers.decode.tbt_slo.tbt import IterationPredictors
from workers.kvcache.shared_prefixes import computes_for, num_blocks_worth_waiting


@dataclass(slots=True, eq=False)
class Prompt:
    """An inlined prompt. Its first `num_done` tokens have KVCache."""

    request: SimulatedRequest
    member: Member
    tbt_slo_s: float | None
    """The TBT SLO in seconds, which is the same for all requests of a simulation."""
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """The number of tokens still to be computed."""
        return self.request.num_input_tokens - self.num_done


@dataclass(frozen=True, slots=True)
class Mixed:
    """An iteration with chunks of prompts.

    `batch_size` and `num_kv_tokens` are those of the batch when the iteration began.
    """

    chunks: Sequence[tuple[Prompt, int]]
    batch_size: int
    num_kv_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all chunks."""
        return sum(num_tokens for _, num_tokens in self.chunks)

    @property
    def num_prompt_pairs(self) -> float:
        """The number of pairs of a token of a chunk and an earlier token of the same prompt."""
        return sum(prefill_quantities(*share)[1] for share in self.shares)

    @property
    def shares(self) -> list[PromptShare]:
        """The chunks in the form of the cost model."""
        return [PromptShare(num_tokens, prompt.num_done) for prompt, num_tokens in self.chunks]


class PrefixTurns:
    """The turns of prompts with a common prefix.

    Later prompts begin when an earlier one has stored the prefix. The rule is the server's
    (`workers.kvcache.shared_prefixes`).
    """

    def __init__(self, block_tokens: int) -> None:
        self._num_blocks = num_blocks_worth_waiting(block_tokens)
        self._num_held: dict[Prompt, int] = {}
        """The number of leading blocks that the pool held for each prompt, in order of arrival.

        It is 0 until the prompt has pages.
        """
        self._waiting: dict[Prompt, Callable[[], None]] = {}

    def add(self, prompt: Prompt, begin: Callable[[], None]) -> None:
        """Call `begin` once no earlier prompt computes blocks that this prompt can reuse."""
        self._num_held[prompt], self._waiting[prompt] = 0, begin
        self._begin_next()

    def reserved(self, prompt: Prompt, num_held: int) -> None:
        """Record that a prompt has its pages, and the number of leading blocks that the pool held."""
        self._num_held[prompt] = num_held
        self._begin_next()

    def end(self, prompt: Prompt) -> None:
        """Remove a prompt whose blocks have been stored, or will not be stored. Idempotent."""
        self._waiting.pop(prompt, None)
        if self._num_held.pop(prompt, None) is not None:
            self._begin_next()

    def _begin_next(self) -> None:
        for prompt, begin in list(self._waiting.items()):
            if prompt in self._waiting and not self._must_wait(prompt):
                del self._waiting[prompt]
                begin()

    def _must_wait(self, prompt: Prompt) -> bool:
        keys = prompt.request.block_keys
        before = itertools.takewhile(lambda of: of[0] is not prompt, self._num_held.items())
        return any(
            computes_for(other.request.block_keys, num_held, keys, self._num_blocks)
            for other, num_held in before
        )


class InlinedPrompts:
    """The prompts that have device pages and are not computed yet, in order of computation."""

    def __init__(self, predictors: IterationPredictors, limits: ChunkLimits) -> None:
        self._predictors, self._budget = predictors, PromptBudget(predictors, limits)
        self._prompts: dict[Prompt, None] = {}
        self.turns = PrefixTurns(limits.least)
        self.num_device_tokens = self.num_computed = 0
        self.mixed = MixedIterations()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt) -> None:
        """Add a prompt, to be computed after all present ones."""
        self._prompts[prompt] = None
        self.num_device_tokens += prompt.request.num_input_tokens

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt that has been computed or aborted. Idempotent."""
        if prompt in self._prompts:
            del self._prompts[prompt]
            self.num_device_tokens -= prompt.request.num_input_tokens

    def plan(self, batch: Batch) -> Mixed | None:
        """Return the next iteration, with chunks of prompts beside this batch; None if it has no chunks."""
        prompts = list(self._prompts)
        if not prompts:
            return None
        slo_s, decodes = prompts[0].tbt_slo_s, batch.size > 0
        allowance = self._budget.allowance(batch.size, batch.num_kv_tokens, slo_s, decodes=decodes)
        taken = [(prompt, allowance.take(prompt.num_done, prompt.num_left)) for prompt in prompts]
        chunks = [(prompt, num_tokens) for prompt, num_tokens in taken if num_tokens]
        return Mixed(chunks, batch.size, batch.num_kv_tokens) if chunks else None

    def ended(self, iteration: Mixed, seconds: float) -> list[Prompt]:
        """Learn from an iteration, and return the prompts that it has completed. They are removed."""
        num_tokens = iteration.num_prompt_tokens
        batch = iteration.batch_size, iteration.num_kv_tokens
        self._predictors.observe(*batch, num_tokens, iteration.num_prompt_pairs, seconds)
        computed = []
        for prompt, num_new in iteration.chunks:
            prompt.request.prefill_s += seconds * num_new / num_tokens
            prompt.num_done += num_new
            if prompt in self._prompts and not prompt.num_left:
                self.remove(prompt)
                computed.append(prompt)
        self.num_computed += len(computed)
        mixed = self.mixed
        self.mixed = MixedIterations(
            mixed.num_iterations + 1,
            mixed.num_tokens + iteration.batch_size + len(computed),
            mixed.forward_s + seconds,
            mixed.num_prompt_tokens + num_tokens,
        )
        return computed
