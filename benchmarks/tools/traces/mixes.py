"""Loads of a few classes of requests with fixed lengths. Prompts share nothing.

Owns: the classes of the named mixes, and the SLOs that belong to them. Does not know: the loaded system.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.request import TraceRequest


class RequestClass(NamedTuple):
    """A class of requests, with its `share` of all requests."""

    share: float
    num_input_tokens: int
    num_output_tokens: int


class Mix(NamedTuple):
    """Classes whose shares add up to 1, and the SLOs of their requests."""

    classes: tuple[RequestClass, ...]
    ttft_slo_s: float
    tbt_slo_s: float


MIXES = {
    "chat-and-documents": Mix((RequestClass(0.8, 120, 64), RequestClass(0.2, 1500, 16)), 5.0, 0.15),
}
"""The mixes by name. `chat-and-documents` has short chats beside long prompts.

It shows how much prefills disturb decoding.
"""


def mixed(mix: Mix, rate_per_s: float, burstiness: float, seed: int) -> Iterator[TraceRequest]:
    """Yield requests of a mix, without end."""
    rng = random.Random(seed)
    shares = [of_class.share for of_class in mix.classes]
    for arrival_s in arrivals(rate_per_s, burstiness, rng):
        (chosen,) = rng.choices(mix.classes, shares)
        yield TraceRequest(arrival_s, chosen.num_input_tokens, chosen.num_output_tokens)
