"""A sequence that is being decoded: its tokens, its pages, and the test for its end."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from kvstore.messages import Reservation
from mooncake.messages import FinishReason, Ref, Request


class Place(Enum):
    """Where a sequence's KVCache is.

    POOL ──> DEVICE <──> HOST        preempted sequences wait in host memory
    """

    POOL = auto()
    DEVICE = auto()
    HOST = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Invariants: `tokens` is the prompt followed by the output, the newest token has no KVCache yet;
    `pages` is empty unless `place` is DEVICE; `saved` unless it is HOST.
    """

    ref: Ref
    request: Request
    reservation: Reservation
    num_cached_tokens: int
    tokens: list[int]
    place: Place = Place.POOL
    pages: list[int] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KVCache exists."""
        return len(self.tokens) - 1

    def num_pages_needed(self, page_size: int) -> int:
        """Pages for the KVCache after the next iteration."""
        return -(-len(self.tokens) // page_size)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set as soon as the newest token is the last."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None
