"""A request at a decode instance, with its tokens, its pages, its times and its end."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from mooncake.messages.aging import rank_s
from mooncake.messages.blocks import BlockKey, extended_keys
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.requests import FinishReason, HeldStep, Ref, Request, TokenLogprobs
from mooncake.model.grammar import GrammarState
from workers.engine.logit_changes import LogitRules
from workers.execution.draws import rules_of


class SequenceState(Enum):
    """The states of a sequence in a decode instance.

    NEW ──> WAITING ──> LOADING ──> RUNNING ──> LEAVING ──> OUT
     │         ^                       ^                       │
     │         └───────────── preempted sequences ─────────────┘
     └──────────> PREPARED ────────────┘

    LEAVING follows from WAITING, LOADING and PREPARED, too.
    """

    NEW = auto()  # its prefill has not ended, or its KVCache is in flight
    WAITING = auto()  # it waits for device pages
    LOADING = auto()  # its KVCache is being copied to its device pages
    PREPARED = auto()  # it migrates here and has pages here, but its source still decodes it
    RUNNING = auto()
    LEAVING = auto()  # it has left the batch, and its pages are still used
    OUT = auto()  # it has left the batch and given its pages back


PRE_COPY, PREPARE = "pre_copy", "prepare"


class CopyTimes(NamedTuple):
    """The times of one round of a migration: `PRE_COPY` at its source, `PREPARE` at its destination."""

    name: str
    began_s: float
    ended_s: float | None = None
    """The time at which the round ended; None before the end."""
    num_tokens: int | None = None
    """The number of tokens whose KVCache has been copied when the round ends; None before the end."""

    def ended(self, at_s: float, num_tokens: int) -> "CopyTimes":
        """Return a copy of the round with its end at `at_s` and its number of tokens."""
        return self._replace(ended_s=at_s, num_tokens=num_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request at a decode instance, from its `Reserve` or `Prepare` order on.

    Invariants:

    - `tokens` is the prompt followed by the output, which includes the output of earlier attempts.
    - The newest token has no KVCache yet. Until the first token of an inlined prompt is drawn, only the
      prompt's cached tokens and computed tokens have KVCache.
    - `pages` is empty unless `state` is LOADING, PREPARED, RUNNING or LEAVING.
    - In WAITING, and in OUT after a preemption, the sequence's KVCache is in the pool or in host memory
      (`SequenceBlocks`). An inlined prompt may have no KVCache yet.
    """

    number: int
    """The sequence's number in order of arrival."""
    ref: Ref
    request: Request
    tokens: list[int]
    is_inlined: bool = False
    """Whether this instance computes the prompt, in decode iterations."""
    num_tokens_by_source: Counter[str] = field(default_factory=Counter)
    """Tokens of an inlined prompt by the source of their KVCache (`PREFILL_SOURCES`)."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KVCache was found, not computed."""
    num_computed_tokens: int = 0
    """The number of tokens behind the cached ones that iterations have computed.

    The number is valid until this attempt has drawn a token.
    """
    state: SequenceState = SequenceState.NEW
    in_flight_until: int | None = None
    """The number of tokens with KVCache after the planned or running iteration; None if there is none."""
    pages: list[int] = field(default_factory=list)
    num_stores: int = 0
    """The number of stores in progress that read the sequence's pages."""
    num_stays: int = 0
    """The number of times that the sequence has given its device pages back."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """The event that the sequence has device pages, or needs none any more."""
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    """The event that an inlined prompt has its first token. The event is also set together with `left`."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The event that the sequence has left the batch.

    Its tokens are sent then, and no iteration uses its pages.
    """
    copy_at: int | None = None
    """The number of tokens with KVCache at which a migration's next copy is due; None if none is ordered."""
    copy_due: asyncio.Event = field(default_factory=asyncio.Event)
    """The event that a migration's copy is due. It is cleared when the copy begins.

    A copy is due when `copy_at` tokens have KVCache, or when the sequence waits and does not grow.
    """
    is_wanted_elsewhere: bool = False
    """Whether another instance is to continue the sequence, which therefore leaves the batch soon."""
    error: Exception | None = None
    must_be_alone: bool = False
    """Whether the sequence may share no iteration with others.

    That is so while the sequence is a suspect and no iteration here has drawn a token of it.
    """
    tbt_slo_s: float | None = None
    """The limit of the time between tokens in seconds; None for no limit."""
    received_s: float = 0.0
    """The time at which the request arrived at this instance, in seconds of the event loop's clock.

    All times below are of that clock too.
    """
    reserved_s: float | None = None
    """The time at which the prompt had its pages in the pool."""
    ordered_s: float | None = None
    """The time of the order to decode."""
    turn_s: float | None = None
    """The time at which the batch was small enough for the sequence."""
    arrived_s: float | None = None
    """The time at which the KVCache was in the pool."""
    joined_s: float | None = None
    """The time at which the sequence first joined the batch."""
    prefilled_s: float | None = None
    """The time at which an inlined prompt had its first token."""
    first_sent_s: float | None = None
    """The time at which the first token of a prompt prefilled elsewhere was sent."""
    left_s: float | None = None
    """The time at which the last token was drawn, or the sequence was handed over."""
    copies: list[CopyTimes] = field(default_factory=list)
    """The rounds of migrations from and to this instance."""
    num_preemptions: int = 0
    newest_logprobs: TokenLogprobs | None = None
    """The logprobs of the newest token; None unless the request wants them."""
    grammar: GrammarState | None = None
    """The state of the grammar that the output must follow; None without one."""
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        self.rules = rules_of(self.request, self.grammar)

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key of the batch's order, by arrival and priority. The key never changes.

        The sequence with the lowest key is the first of the wait queue. Among sequences with equal shares it
        is the last to be preempted.
        """
        return rank_s(self.request.priority, self.received_s), self.number

    def keys(self, block_size: int) -> list[BlockKey]:
        """Return the keys of the full blocks whose KVCache exists."""
        request, num_blocks = self.request, self.num_kv_tokens // block_size
        known = request.block_keys[:num_blocks]
        return extended_keys(known, self.tokens[: num_blocks * block_size], block_size, request.root_key)

    def continue_behind(self, request: Request) -> None:
        """Continue with `request`, whose tokens include the output that another instance has drawn."""
        self.request, self.tokens = request, list(request.token_ids)

    def check_copy(self) -> None:
        """Set `copy_due` if the ordered copy is due. To be called after a change of length or state."""
        is_waiting = self.state is SequenceState.WAITING
        if self.copy_at is not None and (is_waiting or self.num_kv_tokens >= self.copy_at):
            self.copy_due.set()

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens drawn so far, in all attempts."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        """The tokens drawn so far, in all attempts."""
        return self.tokens[self.request.num_prompt_tokens :]

    @property
    def has_drawn(self) -> bool:
        """Whether this attempt has drawn a token."""
        return len(self.tokens) > len(self.request.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens whose KVCache exists, without those of an iteration in flight."""
        return len(self.tokens) - 1 if self.has_drawn else self.num_cached_tokens + self.num_computed_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether an iteration with this sequence is planned or runs."""
        return self.in_flight_until is not None

    @property
    def draws_in_flight(self) -> bool:
        """Whether the iteration in flight computes all known tokens, and therefore draws a token."""
        return self.in_flight_until is not None and self.in_flight_until >= len(self.tokens)

    @property
    def next_start(self) -> int:
        """The position of the first token that the next planned iteration computes."""
        return self.num_kv_tokens if self.in_flight_until is None else self.in_flight_until

    @property
    def num_tokens_to_plan(self) -> int:
        """The number of the request's tokens (prompt and earlier output) that are still to be planned.

        They have no KVCache, and no iteration in flight computes them.
        """
        return max(0, len(self.request.token_ids) - self.next_start)

    @property
    def num_tokens_with_draw(self) -> int:
        """The number of tokens, including a token that is being drawn."""
        return len(self.tokens) + self.draws_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token that is being drawn will be the last, because of `max_tokens`."""
        max_tokens = self.request.sampling.max_tokens
        return self.num_tokens_with_draw - self.request.num_prompt_tokens >= max_tokens

    @property
    def num_prompt_tokens_left(self) -> int:
        """The number of an inlined prompt's tokens that have no KVCache yet; 0 for another request."""
        return len(self.tokens) - self.num_kv_tokens if self.is_inlined and not self.has_drawn else 0

    @property
    def has_begun(self) -> bool:
        """Whether the instance has accepted the request: the double check is passed, or was not needed."""
        return self.has_drawn or self.state is not SequenceState.NEW

    def note_left(self) -> None:
        """Set `left` and `prefilled`: the sequence has left the batch, and no iteration uses its pages."""
        self.left.set()
        self.prefilled.set()

    def num_full_pages(self, page_size: int) -> int:
        """Return the number of pages that the sequence's present KVCache fills."""
        return self.num_kv_tokens // page_size

    def num_pages_needed(self, page_size: int) -> int:
        """Return the number of pages for the sequence's KVCache after the next planned iteration."""
        return -(-self.num_tokens_with_draw // page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the number of pages that the sequence needs if its output reaches `max_tokens`."""
        return -(-(self.request.num_prompt_tokens + self.request.sampling.max_tokens) // page_size)

    @property
    def arrival_s(self) -> float | None:
        """Seconds from the sequence's turn to the arrival of its KVCache; None before the arrival."""
        return None if self.turn_s is None or self.arrived_s is None else self.arrived_s - self.turn_s

    @property
    def joining_s(self) -> float | None:
        """Seconds from the order to decode until the sequence joined the batch, less `arrival_s`.

        None before the sequence has joined, and without an order to decode.
        """
        if self.arrival_s is None or self.ordered_s is None or self.joined_s is None:
            return None
        return self.joined_s - self.ordered_s - self.arrival_s

    @property
    def held_as(self) -> HeldStep | None:
        """The step of this sequence in a report to another Conductor; None if it is about to leave."""
        if self.finish_reason is not None or self.is_wanted_elsewhere:
            return None
        if self.is_inlined:
            return HeldStep.DECODING if self.has_drawn else HeldStep.INLINED
        is_new = self.state is SequenceState.NEW
        return HeldStep.RESERVED if is_new and self.ordered_s is None else HeldStep.DECODING

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the output ends with the newest token; None if the output goes on."""
        sampling = self.request.sampling
        if not self.has_drawn:
            return None
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    @property
    def newest_output(self) -> tuple[str, TokenOutput]:
        """The endpoint of the request's front, and the newest token as an output."""
        output = TokenOutput(
            self.ref,
            self.num_output_tokens - 1,
            self.tokens[-1:],
            self.num_cached_tokens,
            self.finish_reason,
            [] if self.newest_logprobs is None else [self.newest_logprobs],
        )
        return self.request.reply_to, output
