"""The tokens that arrive for one request, and the progress of their arrival.

Source and destination of a migration send over two connections, so the first tokens of the destination may
overtake the last tokens of the source. Early tokens wait until the missing tokens before them have arrived.
Missing tokens may come from any attempt, as every attempt gives the same token at the same position.

Owns: which tokens are new, from any attempt; the error of a request whose tokens are missing.
Does not know: connections, who waits for the tokens.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from conductor.front.errors import GenerationFailedError, UnavailableError
from mooncake.errors import RequestError
from mooncake.messages.fronts import Accepted, TokenOutput
from mooncake.messages.requests import FinishReason, Request, TokenLogprobs


class Received(msgspec.Struct, frozen=True):
    """New tokens of one request, in order and without repetition."""

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    """The logprobs of each token; empty if the request wants none."""


class Lost(msgspec.Struct, frozen=True):
    """The end of a request that gets no more tokens, with the reason."""

    request_id: str
    error: RequestError


Event = Received | Lost | Accepted
Receive = Callable[[Event], None]
"""A callback for the events of one request, called in order as soon as they arrive. It raises nothing."""


MAX_BEATS_FOR_MISSING = 2
"""The number of heartbeats of the front after which early tokens have waited for too long."""


@dataclass(slots=True)
class Reception:
    """The progress with which one request's tokens arrive."""

    request: Request
    receive: Receive
    submitted_s: float
    awaits_acceptance: bool = False
    """Whether the further choices of the answer are held back until the Conductor has accepted this one."""
    num_unaccepted_beats: int = 0
    """The number of the front's heartbeats for which `awaits_acceptance` has been True."""
    last_s: float = field(init=False)
    """Time of the latest tokens, or of the submission."""
    attempt: tuple[int, int] = (0, 0)
    """The latest attempt whose tokens have arrived: the Conductor's epoch, and the attempt's number."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that have arrived in order."""
    early: list[TokenOutput] = field(default_factory=list)
    """Outputs that wait for the missing tokens before them, in order of position.

    Each begins behind the end of `token_ids`.
    """
    num_missing_beats: int = 0
    """Consecutive heartbeats at which there were `early` outputs."""
    num_sent: int | None = None
    """The number of all tokens of the output, once the Conductor has reported that all were sent."""
    num_silent_beats: int = 0
    """Heartbeats without tokens while the Conductor reports all tokens as sent, or the request as unknown."""
    is_unknown: bool = False
    """Whether the Conductor has reported since the latest heartbeat that the request is unknown."""

    def __post_init__(self) -> None:
        self.last_s = self.submitted_s

    @property
    def what_is_missing(self) -> UnavailableError:
        """The error for a request that has not ended but gets no more tokens. The client may retry."""
        num_received = len(self.token_ids)
        if self.num_sent is not None:
            missing = f"{num_received} of {self.num_sent} tokens arrived, the rest was lost"
            return UnavailableError(f"{missing}; try again")
        if num_received:
            return UnavailableError(f"what became of it after {num_received} tokens was lost; try again")
        return UnavailableError("it was lost on its way to the conductor, or what became of it; try again")

    def beat(self) -> bool:
        """Count a heartbeat of the front.

        Returns whether early outputs have waited for too long. False if the Conductor has reported that all
        tokens were sent.
        """
        self.num_missing_beats = self.num_missing_beats + 1 if self.early else 0
        return self.num_missing_beats >= MAX_BEATS_FOR_MISSING and self.num_sent is None

    def accept(self, output: TokenOutput) -> list[Received] | None:
        """Return the tokens that can be passed on after the arrival of `output`; None if `output` is dropped.

        The list is empty if `output` has to wait for earlier tokens, or has nothing new. An output of a
        replaced attempt is dropped, unless early outputs wait: it may fill the gap before them.

        Raises GenerationFailedError if the latest attempt draws other tokens than an earlier attempt did, as
        tokens that the client has read cannot be taken back.
        """
        attempt = _attempt(output)
        is_stale = attempt < self.attempt
        if is_stale and not self.early:
            return None
        self.attempt = max(self.attempt, attempt)
        if output.position > len(self.token_ids):
            insort(self.early, output, key=_position)
            return []
        received = self._new(output, is_stale=is_stale)
        return self._with_early(attempt, received) if self.early else received

    def _with_early(self, attempt: tuple[int, int], received: list[Received]) -> list[Received]:
        """Return `received` with the early outputs that need not wait any more.

        `attempt` is the attempt of the output that has just arrived.
        """
        if attempt == self.attempt:  # this attempt gives the rest, so outputs of earlier ones are not needed
            self.early = [output for output in self.early if _attempt(output) == attempt]
        while self.early and self.early[0].position <= len(self.token_ids):
            if received and received[-1].finish_reason is not None:
                break
            output = self.early.pop(0)
            received += self._new(output, is_stale=_attempt(output) < self.attempt)
        return received

    def _new(self, output: TokenOutput, *, is_stale: bool) -> list[Received]:
        """Append an output that begins at the end of the tokens so far, or earlier.

        Returns the new tokens and the finish reason; an empty list if the output has neither. An output that
        repeats earlier tokens with other values is dropped if it is stale; otherwise GenerationFailedError is
        raised.
        """
        new = output.token_ids
        if output.position < len(self.token_ids):
            known = self.token_ids[output.position : output.position + len(new)]
            if known != new[: len(known)]:
                if is_stale:
                    return []
                raise GenerationFailedError(
                    f"attempt {output.ref.attempt} drew other tokens from {output.position} on than were sent"
                )
            new = new[len(known) :]
        self.token_ids += new
        if not new and output.finish_reason is None:
            return []
        logprobs = output.logprobs and output.logprobs[len(output.token_ids) - len(new) :]
        return [
            Received(output.ref.request_id, new, output.num_cached_tokens, output.finish_reason, logprobs)
        ]


def _position(output: TokenOutput) -> int:
    return output.position


def _attempt(output: TokenOutput) -> tuple[int, int]:
    return (output.ref.epoch, output.ref.attempt)
