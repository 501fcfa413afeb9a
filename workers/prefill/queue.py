"""The wait queue of prompts, which decides the prompts of the next pass.

The prompt with the earliest TTFT deadline goes first. Each step of the priority number adds a minute to the
deadline. Among prompts with equal deadlines the oldest goes first. Prompts pass through three states; only
READY prompts are computed:

    WAITING ──> ADMITTED ──> READY
                    ^──────────┘     reuse has failed, and the blocks to compute are determined again

A prompt without a deadline counts as due after `NO_DEADLINE_S`. So every prompt has a rank that does not
change, and after some time all arriving prompts have later ranks, whatever their priority: no prompt starves.

Prompts of one priority without deadlines share their turns fairly between tenants and answers
(`workers.execution.fair_order`).

A prompt stays WAITING while an admitted prompt before it computes blocks of their common prefix. Afterwards
the prompt finds these blocks in the pool, or only some of them if the admitted prompt was aborted. Admitted
prompts never wait for other prompts, so there is no deadlock.

A tenant with little to compute gets short passes, and such a pass can cut into another tenant's pass between
two layers.

A prompt whose prefix still arrives gets a pass of several chunks if no other prompt is queued. The pass waits
for the prefix layer by layer, and hides the more of the arrival the more it computes.

Owns: order, admission, the prompts of a pass. Does not know: the clock, pages, where KVCache comes from.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from mooncake.messages.aging import due_s, rank_s
from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Flow
from workers.execution.fair_order import FairOrder
from workers.kvcache.shared_prefixes import computes_for, num_blocks_worth_waiting

_UNNAMED = Flow("", "")
_PASSES_AHEAD = 2
"""Passes for which prompts are admitted: one that is being computed, and one that is being prepared."""
_CHUNKS_BESIDE_ARRIVAL = 4
"""The most chunks in a pass of a prompt whose prefix still arrives. Other prompts that come wait for them."""


class PromptState(Enum):
    """States of a queued prompt. WAITING prompts hold no memory."""

    WAITING = auto()
    ADMITTED = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class PromptProgress:
    """The progress of a prompt.

    Invariant: `0 <= num_done <= num_tokens`, where done means computed or reused.
    """

    num_tokens: int
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """The number of tokens that are neither computed nor reused yet."""
        return self.num_tokens - self.num_done


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedPrompt(PromptProgress):
    """A prompt that is not completely computed.

    No pass goes beyond the next end of a chunk (`chunk_ends`).
    """

    priority: int = 0
    deadline_s: float
    arrival: int
    flow: Flow = _UNNAMED
    shares_turns: bool = False
    """Whether the prompt has no deadline. Such prompts of one priority take turns by tenant and answer."""
    num_reusable: int = 0
    """The expected number of tokens that need no computation: an estimate, used until the prompt is READY."""
    block_keys: Sequence[BlockKey] = ()
    num_held_blocks: int = 0
    """Leading blocks that the pool held when the prompt got its memory; 0 before."""
    start: float = 0.0
    """The prompt's start in the tenant's virtual time (`FairOrder`)."""
    is_alone: bool = False
    state: PromptState = PromptState.WAITING
    prefix_arrives: bool = False
    """Whether some of the reused blocks still arrive in the pool. The next pass waits for their layers."""
    chunk_ends: Sequence[int] = field(default=())
    """The ends of the prompt's chunks in tokens, the last one the prompt's end."""

    @property
    def num_left_of_chunk(self) -> int:
        """The number of tokens up to the next of `chunk_ends`."""
        return next(end for end in self.chunk_ends if end > self.num_done) - self.num_done

    @property
    def num_expected(self) -> int:
        """The number of tokens that will probably be computed. It is certain once the prompt is READY."""
        return self.num_left if self.state is PromptState.READY else self.num_tokens - self.num_reusable

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key of the queue: the lowest goes first."""
        return rank_s(self.priority, self.deadline_s), self.arrival


class QueuedChunk(NamedTuple):
    """The next `num_tokens` of a prompt as a part of a planned pass."""

    prompt: QueuedPrompt
    num_tokens: int


Cut = Callable[[int, int], Sequence[range]]
"""A function that returns the chunks of tokens `[start, end)` of a prompt."""


def uncut(start: int, end: int) -> Sequence[range]:
    """Return `[start, end)` as one chunk, so that only the limit of a pass cuts a prompt."""
    return [range(start, end)]


class PrefillQueue:
    """All prompts of an instance that are not completely computed.

    A pass has at most `prefill_chunk` tokens, rounded down to a multiple of `multiple`. Further prompts join
    the first prompt's pass up to `saturating_tokens` in all (default: `prefill_chunk`). A pass with more
    tokens would compute no more tokens a second, and its prompts would only wait for one another.

    `block_size` is the number of tokens of a block of `block_keys`.

    A chunk that begins at a multiple of `multiple` tokens ends at such a multiple too, unless it is the last
    chunk of its prompt.
    """

    def __init__(
        self,
        prefill_chunk: int,
        cut: Cut = uncut,
        saturating_tokens: int | None = None,
        multiple: int = 1,
        block_size: int = 1,
    ) -> None:
        assert multiple <= prefill_chunk, "the first prompt always has a chunk"
        self._prefill_chunk = prefill_chunk - prefill_chunk % multiple
        self._cut, self._multiple = cut, multiple
        self._saturating_tokens = min(saturating_tokens or self._prefill_chunk, self._prefill_chunk)
        self.num_stages = 1
        """The number of instances that compute each pass together: one more with a helper that has layers.

        The first prompt of a pass may have so many chunks in it.
        """
        self._num_blocks_worth_waiting = num_blocks_worth_waiting(block_size)
        self._prompts: list[QueuedPrompt] = []
        self._storing: list[QueuedPrompt] = []
        """Prompts that have been computed, and whose last blocks are being stored in the pool."""
        self._fair_order = FairOrder(self._saturating_tokens)
        self._num_arrived = 0

    def add(
        self,
        num_tokens: int,
        time_left_s: float | None,
        now_s: float,
        priority: int = 0,
        flow: Flow = _UNNAMED,
        num_reusable: int = 0,
        block_keys: Sequence[BlockKey] = (),
        *,
        is_alone: bool = False,
    ) -> QueuedPrompt:
        """Add a prompt, and return its entry.

        Args:
            num_tokens: The length of the prompt.
            time_left_s: Seconds until the first token is due; None without a deadline. An overdue prompt
                counts as due now.
            now_s: The present time in seconds.
            priority: The request's priority number; lower goes first.
            flow: The tenant and the answer.
            num_reusable: The number of tokens that probably need no computation.
            block_keys: The keys of the prompt's full blocks.
            is_alone: Whether the prompt shares no pass with other prompts.
        """
        self._num_arrived += 1
        prompt = QueuedPrompt(
            num_tokens,
            priority=priority,
            deadline_s=due_s(time_left_s, now_s),
            arrival=self._num_arrived,
            flow=flow,
            shares_turns=time_left_s is None,
            num_reusable=num_reusable,
            block_keys=block_keys,
            is_alone=is_alone,
        )
        self._insert(prompt)
        return prompt

    @property
    def prefill_chunk(self) -> int:
        """The most tokens of a chunk."""
        return self._prefill_chunk

    @property
    def saturating_tokens(self) -> int:
        """The number of tokens with which a pass reaches the device's full speed, at most `prefill_chunk`."""
        return self._saturating_tokens

    def most_next(self, prompt: QueuedPrompt, *, prefix_arrives: bool) -> int:
        """Return the most tokens of a pass that begins with `prompt`."""
        hides_arrival = prefix_arrives and self._prompts == [prompt]
        return self._prefill_chunk * (_CHUNKS_BESIDE_ARRIVAL if hides_arrival else self.num_stages)

    def ready(self, prompt: QueuedPrompt, num_done: int, *, prefix_arrives: bool = False) -> None:
        """Mark a prompt as READY: its first `num_done` tokens need no computation.

        A prompt for which `computed` was called enters the queue again. `prefix_arrives` is the field's value
        up to the end of the next pass.
        """
        if prompt not in self._prompts:
            self._storing.remove(prompt)
            self._insert(prompt)
        prompt.num_done, prompt.state = num_done, PromptState.READY
        prompt.prefix_arrives = prefix_arrives
        prompt.chunk_ends = [chunk.stop for chunk in self._cut(num_done, prompt.num_tokens)]

    def computed(self, prompt: QueuedPrompt) -> None:
        """Record that the last pass of a prompt has ended. `remove` follows when its blocks are stored.

        A prompt that was aborted in that pass has been removed already, and stays removed.
        """
        if prompt in self._prompts:
            self.remove(prompt)
            self._storing.append(prompt)

    def remove(self, prompt: QueuedPrompt) -> None:
        """Remove a prompt that has been stored or aborted. Idempotent."""
        if prompt in self._prompts:
            self._prompts.remove(prompt)
            self._fair_order.leave(prompt)
        elif prompt in self._storing:
            self._storing.remove(prompt)

    def _insert(self, prompt: QueuedPrompt) -> None:
        bisect.insort(self._prompts, prompt, key=lambda queued: queued.rank)
        self._fair_order.enter(prompt)

    def _in_order(self) -> list[QueuedPrompt]:
        sharing: defaultdict[int, list[QueuedPrompt]] = defaultdict(list)
        for prompt in self._prompts:
            if prompt.shares_turns:
                sharing[prompt.priority].append(prompt)
        turns = {priority: iter(self._fair_order.ordered(prompts)) for priority, prompts in sharing.items()}
        return [next(turns[turn.priority]) if turn.shares_turns else turn for turn in self._prompts]

    def next_to_admit(self, admitted: QueuedPrompt | None = None) -> QueuedPrompt | None:
        """Return the first WAITING prompt; None if the prompts before it fill the next passes.

        Prompts that wait for blocks which another prompt computes are passed over.

        `admitted` is a prompt that is waiting for its memory, perhaps for long. Then only a prompt that comes
        before `admitted`, is of a tenant with little to compute, and takes little memory is returned.
        """
        num_ahead = 0
        computing = list(self._storing)
        for prompt in self._in_order():
            if prompt is admitted or num_ahead >= _PASSES_AHEAD * self._prefill_chunk:
                return None
            if prompt.state is PromptState.WAITING:
                if any(self._computes_for(other, prompt) for other in computing):
                    continue
                if admitted is None:
                    return prompt
                is_small = prompt.num_tokens <= self._prefill_chunk
                return prompt if is_small and self._is_light(prompt.flow.tenant) else None
            computing.append(prompt)
            num_ahead += prompt.num_left
        return None

    def _computes_for(self, prompt: QueuedPrompt, other: QueuedPrompt) -> bool:
        """Return whether `prompt` computes blocks for which `other` waits."""
        num_blocks = self._num_blocks_worth_waiting
        return computes_for(prompt.block_keys, prompt.num_held_blocks, other.block_keys, num_blocks)

    def plan(self) -> list[QueuedChunk]:
        """Return the chunks of the next pass, perhaps none, and charge them to their tenants.

        If the first prompts in order are of tenants with little to compute, the pass has only these prompts.
        Otherwise the pass takes from each prompt in order as many tokens as fit.
        """
        return self._charged(self._plan_light([]) or self._plan_full())

    def plan_cut_in(self, running: Collection[QueuedPrompt]) -> list[QueuedChunk]:
        """Return a pass that is computed between two layers of the pass of `running`; it may be empty.

        The pass has prompts of tenants with little to compute that come before all prompts of `running`. If
        all tenants of `running` have little to compute, their pass is short, and nothing cuts into it.
        """
        if any(prompt.is_alone for prompt in running):
            return []
        if all(self._is_light(tenant) for tenant in {prompt.flow.tenant for prompt in running}):
            return []
        return self._charged(self._plan_light(running))

    def _plan_light(self, running: Collection[QueuedPrompt]) -> list[QueuedChunk]:
        """Return the leading READY prompts that may share a short pass, up to the first prompt of `running`.

        The pass has at most `saturating_tokens`, and only whole prompts of tenants with little to compute.
        Prompts of a tenant with more to compute would make the pass longer, and would not end sooner.
        """
        chunks, room = list[QueuedChunk](), self._saturating_tokens
        for prompt in self._in_order():
            if prompt in running:
                break
            if prompt.state is not PromptState.READY:
                continue
            fits_whole = prompt.num_left <= room and prompt.num_left == prompt.num_left_of_chunk
            if prompt.is_alone or not fits_whole or not self._is_light(prompt.flow.tenant):
                break
            chunks.append(QueuedChunk(prompt, prompt.num_left))
            room -= prompt.num_left
        return chunks

    def _is_light(self, tenant: str) -> bool:
        """Return whether a tenant has little to compute: at most `saturating_tokens`."""
        num_expected = 0
        for other in self._prompts:
            if other.flow.tenant == tenant:
                num_expected += other.num_expected
                if num_expected > self._saturating_tokens:
                    return False
        return True

    def _plan_full(self) -> list[QueuedChunk]:
        chunks, num_taken = list[QueuedChunk](), 0
        for prompt in self._in_order():
            if num_taken >= self._saturating_tokens:
                break
            if chunks and (prompt.is_alone or chunks[0].prompt.is_alone):
                continue
            if prompt.state is PromptState.READY:
                most = self._saturating_tokens
                if not chunks:
                    most = self.most_next(prompt, prefix_arrives=prompt.prefix_arrives)
                num_tokens = self._num_next(prompt, most - num_taken)
                if num_tokens:
                    chunks.append(QueuedChunk(prompt, num_tokens))
                    num_taken += num_tokens
        return chunks

    def _charged(self, chunks: list[QueuedChunk]) -> list[QueuedChunk]:
        """Return the chunks, after charging them to their tenants."""
        for chunk in chunks:
            self._fair_order.computed(*chunk)
        return chunks

    def _num_next(self, prompt: QueuedPrompt, room: int) -> int:
        num_tokens = min(prompt.num_left_of_chunk, room)
        end = prompt.num_done + num_tokens
        return num_tokens if end == prompt.num_tokens else max(0, num_tokens - end % self._multiple)
