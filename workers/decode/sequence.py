"""Sequences of the decode batch: tokens, pages, and the test for the end."""

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
    """A sequence's place on its way through the batch.

    NEW ──> WAITING ──> LOADING ──> RUNNING ──> LEAVING ──> OUT        LEAVING from any
     │         ^                       ^                       │
     │         └───────────── preempted sequences ─────────────┘
     └──────────> PREPARED ────────────┘
    """

    NEW = auto()  # prefill has not ended, or its KVCache is in flight
    WAITING = auto()  # for memory of the device
    LOADING = auto()  # its KVCache is being copied to its pages
    PREPARED = auto()  # it migrates here, with pages, and is decoded elsewhere
    RUNNING = auto()
    LEAVING = auto()  # has left the batch, its pages are in use
    OUT = auto()  # without pages


PRE_COPY, PREPARE = "pre_copy", "prepare"


class CopyTimes(NamedTuple):
    """A round of a migration: `PRE_COPY` at its source, `PREPARE` at its destination."""

    name: str
    began_s: float
    ended_s: float | None = None
    """None until the round has ended."""
    num_tokens: int | None = None
    """Tokens of the sequence whose KVCache has been copied by then."""

    def ended(self, at_s: float, num_tokens: int) -> "CopyTimes":
        """Return the round once it has ended."""
        return self._replace(ended_s=at_s, num_tokens=num_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the decode batch.

    Invariants:

    - `tokens` is the prompt followed by the output, that of earlier attempts included.
    - The newest token has no KVCache yet. Until the first token of an inlined prompt is drawn, only its
      cached and its computed tokens have KVCache.
    - `pages` is empty unless `state` is LOADING, PREPARED, RUNNING or LEAVING. In other states the KVCache is
      in the pool or in host memory (`SequenceBlocks`).
    """

    number: int
    """Sequence number in order of arrival."""
    ref: Ref
    request: Request
    tokens: list[int]
    is_inlined: bool = False
    """Whether the prompt is computed here, in iterations."""
    num_tokens_by_source: Counter[str] = field(default_factory=Counter)
    """Tokens of an inlined prompt by the source of their KVCache (`PREFILL_SOURCES`)."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KVCache was found."""
    num_computed_tokens: int = 0
    """Number of tokens behind these that iterations have computed; counted until the first token is drawn."""
    state: SequenceState = SequenceState.NEW
    in_flight_until: int | None = None
    """Number of tokens with KVCache once the iteration in flight, planned or running, has ended; None if the
    sequence is in no iteration."""
    pages: list[int] = field(default_factory=list)
    num_stays: int = 0
    """Number of times that the sequence has given its device pages back."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sequence has its device pages, or does not need them any more."""
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first token of an inlined prompt is drawn, or with `left`."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sequence has left the batch, its tokens are sent, and nothing computes with its pages."""
    copy_at: int | None = None
    """Number of tokens with KVCache at which a migration wants the full blocks in the pool; None if no
    migration wants them."""
    copy_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the sequence has at least `copy_at` tokens, or does not grow any more."""
    is_wanted_elsewhere: bool = False
    """Whether another instance is to go on with the sequence: it leaves the batch as soon as it can."""
    error: Exception | None = None
    must_be_alone: bool = False
    """Whether the next iteration is shared with no other sequence: this one is a suspect."""
    tbt_slo_s: float | None = None
    """Limit of the time between tokens; None: no limit."""
    received_s: float = 0.0
    """Arrival here; like the times below, by the event loop's clock."""
    reserved_s: float | None = None
    """Time when the prompt had its pages in the pool."""
    ordered_s: float | None = None
    """Time of the order to decode."""
    turn_s: float | None = None
    """Time when the batch was small enough."""
    arrived_s: float | None = None
    """Time when the KVCache was in the pool."""
    joined_s: float | None = None
    """Time of the first iteration."""
    prefilled_s: float | None = None
    """Time when an inlined prompt had its first token."""
    first_sent_s: float | None = None
    """Time when the first token of a prompt that was prefilled elsewhere was sent."""
    left_s: float | None = None
    """Time when the last token was drawn, or the sequence was handed over."""
    copies: list[CopyTimes] = field(default_factory=list)
    """Rounds of migrations from here and to here."""
    num_preemptions: int = 0
    newest_logprobs: TokenLogprobs | None = None
    """Logprobs of the newest token, if the request wants them."""
    grammar: GrammarState | None = None
    """State of the grammar that the output must follow."""
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        self.rules = rules_of(self.request, self.grammar)

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key of admission: the lowest is admitted first and preempted last. It never changes."""
        return rank_s(self.request.priority, self.received_s), self.number

    def keys(self, block_size: int) -> list[BlockKey]:
        """Return the keys of the full blocks whose KVCache exists."""
        request, num_blocks = self.request, self.num_kv_tokens // block_size
        known = request.block_keys[:num_blocks]
        return extended_keys(known, self.tokens[: num_blocks * block_size], block_size, request.root_key)

    def continue_behind(self, request: Request) -> None:
        """Go on behind the output of `request`, which another instance has drawn."""
        self.request, self.tokens = request, list(request.token_ids)

    def check_copy(self) -> None:
        """Note whether the copy that a migration wants is due, after a change of length or state."""
        is_waiting = self.state is SequenceState.WAITING
        if self.copy_at is not None and (is_waiting or self.num_kv_tokens >= self.copy_at):
            self.copy_due.set()

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens drawn so far, in earlier attempts too."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        """Tokens drawn so far, in earlier attempts too."""
        return self.tokens[self.request.num_prompt_tokens :]

    @property
    def has_drawn(self) -> bool:
        """Whether this attempt has drawn a token."""
        return len(self.tokens) > len(self.request.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens whose KVCache exists when nothing is in flight."""
        return len(self.tokens) - 1 if self.has_drawn else self.num_cached_tokens + self.num_computed_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether an iteration with this sequence is planned or runs."""
        return self.in_flight_until is not None

    @property
    def draws_in_flight(self) -> bool:
        """Whether the iteration in flight draws a token: it computes all that are known."""
        return self.in_flight_until is not None and self.in_flight_until >= len(self.tokens)

    @property
    def next_start(self) -> int:
        """Position from which on the next planned iteration computes."""
        return self.num_kv_tokens if self.in_flight_until is None else self.in_flight_until

    @property
    def num_tokens_to_plan(self) -> int:
        """Number of tokens that this attempt began with and no iteration has computed or computes now."""
        return max(0, len(self.request.token_ids) - self.next_start)

    @property
    def num_planned_tokens(self) -> int:
        """Number of tokens, the one that is being drawn included."""
        return len(self.tokens) + self.draws_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token that is being drawn is the last one whatever it is, because of `max_tokens`."""
        max_tokens = self.request.sampling.max_tokens
        return self.num_planned_tokens - self.request.num_prompt_tokens >= max_tokens

    @property
    def num_prompt_tokens_left(self) -> int:
        """Number of prompt tokens still to be computed here; 0 unless the prompt is inlined."""
        return len(self.tokens) - self.num_kv_tokens if self.is_inlined and not self.has_drawn else 0

    @property
    def has_begun(self) -> bool:
        """Whether the request is here to stay: its first token may leave, or will be drawn here."""
        return self.has_drawn or self.state is not SequenceState.NEW

    def note_left(self) -> None:
        """Note that the sequence has left the batch, and nothing computes with its pages."""
        self.left.set()
        self.prefilled.set()

    def num_pages_needed(self, page_size: int) -> int:
        """Return the number of pages for the KVCache after the next planned iteration, prompt included."""
        return -(-self.num_planned_tokens // page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that the sequence may need before its end, whose output has `max_tokens`."""
        return -(-(self.request.num_prompt_tokens + self.request.sampling.max_tokens) // page_size)

    @property
    def arrival_s(self) -> float | None:
        """Seconds in which only the KVCache was lacking."""
        return None if self.turn_s is None or self.arrived_s is None else self.arrived_s - self.turn_s

    @property
    def joining_s(self) -> float | None:
        """Seconds of the other waits into the batch: for the turn, and after the KVCache had arrived."""
        if self.arrival_s is None or self.ordered_s is None or self.joined_s is None:
            return None
        return self.joined_s - self.ordered_s - self.arrival_s

    @property
    def held_as(self) -> HeldStep | None:
        """The step that another Conductor is told for this sequence; None if it is about to leave."""
        if self.finish_reason is not None or self.is_wanted_elsewhere:
            return None
        if self.is_inlined:
            return HeldStep.DECODING if self.has_drawn else HeldStep.INLINED
        is_new = self.state is SequenceState.NEW
        return HeldStep.RESERVED if is_new and self.ordered_s is None else HeldStep.DECODING

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ends; None while the newest token is not the last."""
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
        """The newest token, addressed to the request's front."""
        output = TokenOutput(
            self.ref,
            self.num_output_tokens - 1,
            self.tokens[-1:],
            self.num_cached_tokens,
            self.finish_reason,
            [] if self.newest_logprobs is None else [self.newest_logprobs],
        )
        return self.request.reply_to, output
