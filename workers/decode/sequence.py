"""A sequence that is being decoded: its tokens, its pages, and the test for its end."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from kvstore.protocol.answers import Reservation
from mooncake.messages.aging import standing_s
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs
from mooncake.model.grammar import GrammarState
from workers.engine.logit_changes import LogitRules
from workers.execution.draws import rules_of


class SequenceState(Enum):
    """Where a sequence is on its way through the batch.

    NEW ──> WAITING ──> LOADING ──> RUNNING ──> LEAVING ──> OUT        LEAVING from any
               ^                                               │
               └───────────── preempted sequences ─────────────┘
    """

    NEW = auto()  # prefill has not ended, or its KVCache is on its way
    WAITING = auto()  # for memory of the device
    LOADING = auto()  # its KVCache comes to its pages
    RUNNING = auto()
    LEAVING = auto()  # has left the batch, its pages are in use
    OUT = auto()  # without pages


@dataclass(slots=True, eq=False)
class Sequence:
    """Invariants: `tokens` is the prompt followed by the output, that of earlier attempts included;
    the newest token has no KVCache yet; of an inlined prompt `num_cached_tokens` have one until its first
    token has been drawn; `pages` is empty unless `state` is LOADING, RUNNING or LEAVING; while it waits, its
    KVCache is in the pages of `reservation` or in `saved`.
    """

    number: int
    """in order of arrival"""
    ref: Ref
    request: Request
    tokens: list[int]
    num_cached_tokens: int = 0
    state: SequenceState = SequenceState.NEW
    is_in_flight: bool = False
    """an iteration is planned or runs that draws its next token"""
    pages: list[int] = field(default_factory=list)
    reservation: Reservation | None = None
    saved: list[torch.Tensor] = field(default_factory=list)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """its pages are there"""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """it has left the batch, its tokens have left for the front, and nothing computes with its pages"""
    error: Exception | None = None
    must_be_alone: bool = False
    """its next iteration is shared with no other: it may be what ends instances"""
    tbt_slo_s: float | None = None
    """None: a token may take any time"""
    came_s: float = 0.0
    """when it was taken on, as the four below a time of the event loop"""
    ordered_s: float | None = None
    """when the order to decode came"""
    turn_s: float | None = None
    """when the batch was small enough for it"""
    arrived_s: float | None = None
    """when its KVCache was there"""
    joined_s: float | None = None
    """when it first joined the batch"""
    newest_logprobs: TokenLogprobs | None = None
    """of the newest token, if the request wants them"""
    grammar: GrammarState | None = None
    """what its output must follow"""
    rules: LogitRules | None = field(init=False)

    def __post_init__(self) -> None:
        self.rules = rules_of(self.request, self.grammar)

    @property
    def rank(self) -> tuple[float, int]:
        """Lower ones go first, and are preempted last. It does not change."""
        return standing_s(self.request.priority, self.came_s), self.number

    @property
    def num_reserved_pages(self) -> int:
        """Pages of the pool that its reservation added to what the pool held."""
        return 0 if self.reservation is None else sum(not block.sealed for block in self.reservation.blocks)

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far, those of earlier attempts included."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def has_drawn(self) -> bool:
        """Whether there is a token of this attempt."""
        return len(self.tokens) > len(self.request.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KVCache exists when nothing is in flight."""
        return len(self.tokens) - 1 if self.has_drawn else self.num_cached_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens that there will be once what is in flight has ended."""
        return len(self.tokens) + self.is_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """The token that is in flight is the last in any case."""
        max_tokens = self.request.sampling.max_tokens
        return self.num_planned_tokens - self.request.num_prompt_tokens >= max_tokens

    @property
    def num_tokens_left(self) -> int:
        """Of the prompt, if it is inlined and its first token is not known: what is still to be computed."""
        return 0 if self.has_drawn else len(self.tokens) - self.num_cached_tokens

    @property
    def has_begun(self) -> bool:
        """It is here to stay: its first token has left, or will be drawn here."""
        return self.has_drawn or self.state is not SequenceState.NEW

    def num_pages_needed(self, page_size: int) -> int:
        """Pages for the KVCache after the next iteration to be planned."""
        return -(-self.num_planned_tokens // page_size)

    @property
    def arrival_s(self) -> float | None:
        """For how long nothing but its KVCache was lacking."""
        return None if self.turn_s is None or self.arrived_s is None else self.arrived_s - self.turn_s

    @property
    def joining_s(self) -> float | None:
        """How long else it took into the batch: until it was its turn, and when its KVCache was there."""
        if self.arrival_s is None or self.ordered_s is None or self.joined_s is None:
            return None
        return self.joined_s - self.ordered_s - self.arrival_s

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set as soon as the newest token is the last."""
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
