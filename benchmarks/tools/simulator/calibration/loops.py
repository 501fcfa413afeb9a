"""Closed loops that calibrate a simulation, and figures of their outcomes.

Owns: how a loop is sent, mean times of its requests. Does not know: what is concluded from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from benchmarks.tools.load.outcomes import Outcome
from benchmarks.tools.traces.synthetic import SyntheticLoad, Values
from mooncake.messages.costs import Costs, prefill_quantities

PASS_TOKENS = 512
"""The prompt tokens of a pass, if nothing else limits them."""


class AnyLoop(Protocol):
    """The interface of a loop."""

    def flags(self, folder: Path) -> dict[str, object]:
        """Return the flags for `mooncake-bench run`. Files that it needs are written to `folder`."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop of requests of one size."""

    num_input_tokens: int
    num_output_tokens: int
    concurrency: int
    num_requests: int
    seed: int
    """The loop's own seed. It differs from all others, so that no prompt is cached."""

    def flags(self, folder: Path) -> dict[str, object]:
        return {
            "--lengths": f"{self.num_input_tokens}/{self.num_output_tokens}",
            "--concurrency": self.concurrency,
            "--num-requests": self.num_requests,
            "--seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class MixedLoop:
    """A closed loop of requests of many sizes, so that they neither begin nor end at the same time."""

    name: str
    input_tokens: Values
    output_tokens: Values
    concurrency: int
    num_requests: int
    seed: int
    """The loop's own seed, which differs from all others."""

    def flags(self, folder: Path) -> dict[str, object]:
        file = folder / f"{self.name}.json"
        SyntheticLoad(1.0, self.input_tokens, self.output_tokens).save(file)
        return {
            "--synthetic": file,
            "--concurrency": self.concurrency,
            "--num-requests": self.num_requests,
            "--seed": self.seed,
        }


def prefill_seconds(costs: Costs, num_tokens: int) -> float:
    """Return the seconds of the passes of a prompt that is computed alone."""
    num_passes = -(-num_tokens // PASS_TOKENS)
    return costs.seconds(*prefill_quantities(num_tokens, 0)) + (num_passes - 1) * costs.constant_s


def mean_ttft(outcomes: Sequence[Outcome]) -> float:
    """Return the mean TTFT in seconds."""
    return fmean(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None)


def decode_seconds(outcome: Outcome) -> float:
    """Return the seconds from the first token to the last one."""
    assert outcome.ttft_s is not None
    return outcome.answered_s - outcome.ttft_s


def gap_seconds(outcome: Outcome) -> float:
    """Return the mean seconds between two tokens."""
    return decode_seconds(outcome) / (outcome.num_output_tokens - 1)


def longest_mean(outcomes: Sequence[Outcome]) -> float:
    """Return the mean of the longest tenth of a request's gaps, divided by the mean of all gaps.

    The result is at least 1.
    """
    ratios = [outcome.tbt_s / gap_seconds(outcome) for outcome in outcomes if outcome.tbt_s is not None]
    return max(1.0, fmean(ratios))
