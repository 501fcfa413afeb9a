"""Tokens that arrive for one request, and how far they have come.

Owns: which tokens are new, whatever attempt they are of; what is said of those that are missing.
Does not know: connections, who waits for the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from conductor.front.errors import GenerationFailedError, UnavailableError
from mooncake.errors import RequestError
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.requests import FinishReason, Request, TokenLogprobs


class Received(msgspec.Struct, frozen=True):
    """New tokens of one request, in order and without repetition."""

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    """Logprobs of each token, if the request wants them."""


class Lost(msgspec.Struct, frozen=True):
    """A request that gets no more tokens, and why."""

    request_id: str
    error: RequestError


Event = Received | Lost
Receive = Callable[[Event], None]
"""Callback for the events of one request, in order, as soon as they come; raises nothing."""


@dataclass(slots=True)
class Reception:
    """How far one request's tokens have arrived. Every attempt gives the same token at the same position."""

    request: Request
    receive: Receive
    last_s: float
    attempt: tuple[int, int] = (0, 0)
    """Epoch of the Conductor that placed the request, and attempt."""
    token_ids: list[int] = field(default_factory=list)
    num_sent: int | None = None
    """Number of tokens there are, once the Conductor has said that all were sent."""
    num_silent_beats: int = 0
    """Heartbeats without tokens since the Conductor said that no more come."""
    is_unknown: bool = False
    """The Conductor has said since the latest heartbeat that it does not have the request."""

    @property
    def what_is_missing(self) -> RequestError:
        """Error for a request that gets no more tokens and has not ended."""
        num_received = len(self.token_ids)
        if self.num_sent is not None:
            missing = f"{num_received} of {self.num_sent} tokens arrived, the rest was lost"
            return GenerationFailedError(missing)
        if num_received:
            return GenerationFailedError(f"what became of it after {num_received} tokens was lost")
        return UnavailableError("it was lost on its way to the conductor, or what became of it; try again")

    def accept(self, output: TokenOutput) -> list[int] | None:
        """Return the new tokens of `output`, or None if it belongs to an attempt that has been replaced.

        Raises GenerationFailedError when tokens before these are missing, or differ from those that an
        earlier attempt has given: what the client has read cannot be taken back.
        """
        attempt = (output.ref.epoch, output.ref.attempt)
        if attempt < self.attempt:
            return None
        self.attempt = attempt
        num_received = len(self.token_ids)
        if output.position == num_received:
            self.token_ids += output.token_ids
            return output.token_ids
        if output.position > num_received:
            raise GenerationFailedError(
                f"internal error: tokens {num_received} to {output.position - 1} "
                f"of attempt {self.attempt[1]} did not arrive"
            )
        known = self.token_ids[output.position : output.position + len(output.token_ids)]
        if known != output.token_ids[: len(known)]:
            raise GenerationFailedError(
                f"attempt {self.attempt[1]} drew other tokens from {output.position} on than were sent"
            )
        new = output.token_ids[len(known) :]
        self.token_ids += new
        return new
