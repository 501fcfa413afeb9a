"""Measured prefills and iterations, in the form from which costs are learned.

Owns: which measurements count together, and which do not count. Does not know: costs, instances.
"""

from typing import NamedTuple

from mooncake.messages.heartbeats import DecodeStats

_SAME_PASS = 0.2
"""The most time between the ends of two prefills of one pass, as a share of the predicted prefill time."""


class PrefillPass(NamedTuple):
    """The prefills of one pass of one instance, measured together."""

    num_new_tokens: float
    num_pairs: float
    """The number of pairs of a new token and a token before it, summed over the prompts."""
    seconds: float
    ended_s: float

    def is_that_of(self, ended_s: float, predicted_s: float) -> bool:
        """Return whether a prefill that ended at `ended_s`, of `predicted_s` seconds, was in this pass."""
        return ended_s - self.ended_s < _SAME_PASS * predicted_s

    def with_another(self, other: "PrefillPass") -> "PrefillPass":
        """Return the sum of this pass and `other`, a prefill of the same pass that ended later."""
        return PrefillPass(
            self.num_new_tokens + other.num_new_tokens,
            self.num_pairs + other.num_pairs,
            self.seconds + other.seconds,
            other.ended_s,
        )


class PlainIterations(NamedTuple):
    """The mean batch size and the mean duration of iterations that had no chunks of prompts."""

    batch_size: float
    iteration_s: float


def plain_iterations(before: DecodeStats, now: DecodeStats) -> PlainIterations | None:
    """Return the mean of the iterations without chunks of prompts between the totals `before` and `now`.

    The result is None if there were none.
    """
    num_iterations = now.num_iterations - before.num_iterations
    num_iterations -= now.mixed.num_iterations - before.mixed.num_iterations
    num_tokens = now.num_tokens - before.num_tokens - now.mixed.num_tokens + before.mixed.num_tokens
    seconds = now.forward_s - before.forward_s - now.mixed.forward_s + before.mixed.forward_s
    if min(num_iterations, num_tokens, seconds) <= 0:
        return None
    return PlainIterations(num_tokens / num_iterations, seconds / num_iterations)
