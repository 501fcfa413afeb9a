"""BanaServe's objective for a cluster under a load (section 4.3, equations 18, 19 and 31).

    J = alpha * U_avg - beta * T_avg-latency + gamma * Theta

The terms have different units, and the paper says nothing about the weights: it neither scales the terms nor
names values. So each weight is the worth of one unit of its term. The latency budgets (equation 29) and the
memory (equations 23 and 25) are limits, not terms: a cluster that exceeds them has no J.

Owns: this sum. Does not know: how its terms were measured or predicted.
"""

from typing import NamedTuple

import msgspec


class Weights(NamedTuple):
    """The weights of the objective, 0 or more each."""

    alpha: float
    """The worth of a mean utilisation of 1."""
    beta: float
    """The worth of a second less of mean latency."""
    gamma: float
    """The worth of an output token a second."""


class Terms(msgspec.Struct, frozen=True):
    """The terms of the objective."""

    utilisation: float
    """U_avg, the mean utilisation of all devices, from 0 to 1 (equations 19 and 27)."""
    latency_s: float
    """T_avg-latency, the sum of the mean TTFT and the mean time per output token (equation 19)."""
    output_tokens_per_s: float
    """Theta, the output tokens a second of all instances together (equation 30)."""

    def objective(self, weights: Weights) -> float:
        """Return J (equation 18). The more, the better."""
        return (
            weights.alpha * self.utilisation
            - weights.beta * self.latency_s
            + weights.gamma * self.output_tokens_per_s
        )
