"""Loads that change over time: phases with long prompts or long answers in turn, bursts, growth.

Owns: phases, and the sequence of their requests. Does not know: the loaded system.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.request import TraceRequest


class Phase(NamedTuple):
    """A time of `duration_s` seconds in which `rate_per_s` equal requests arrive each second."""

    duration_s: float
    rate_per_s: float
    num_input_tokens: int
    num_output_tokens: int


def in_phases(phases: Sequence[Phase], burstiness: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the requests of the phases in turn, over and over, without end. Prompts share nothing.

    Args:
        phases: The phases; at least one.
        burstiness: As for `arrivals`.
        seed: The seed of the arrivals.
    """
    rng, began_s = random.Random(seed), 0.0
    for phase in itertools.cycle(phases):
        for at_s in arrivals(phase.rate_per_s, burstiness, rng):
            if at_s >= phase.duration_s:
                break
            yield TraceRequest(began_s + at_s, phase.num_input_tokens, phase.num_output_tokens)
        began_s += phase.duration_s
