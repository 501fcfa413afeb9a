"""A workload that can be played at any rate.

Owns: how rates are changed, how long a load is played. Does not know: who serves it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from benchmarks.tools.simulator.summary import SLOs
from benchmarks.tools.traces.replay import at_speed
from benchmarks.tools.traces.request import TraceError, TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize
from conductor.performance.model import Sizes

FEWEST_REQUESTS = 600
NUM_QUEUES, NUM_ANSWERS = 10, 4
"""The duration of a load: NUM_QUEUES times the TTFT SLO, plus NUM_ANSWERS times the time of a mean answer.

The gaps of the mean answer are taken to be as long as the TBT SLO. The load is long enough to show a growing
queue.
"""

Play = Callable[[float, int, int], Iterable[TraceRequest]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload. `play(rate_per_s, num_requests, nth_seed)` returns its requests."""

    play: Play
    sizes: Sizes
    """The mean numbers of tokens of prompts and answers, over the requests of the first seed."""
    longest_tokens: int
    """Tokens of the longest prompt and answer together."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of prompt and answer of a mean request."""
        return self.sizes.num_prompt_tokens + self.sizes.num_output_tokens

    def at(self, rate_per_s: float, nth_seed: int, slos: SLOs, most_requests: int) -> Iterable[TraceRequest]:
        """Return requests at this rate, as many as a trial needs, at most `most_requests`."""
        assert slos.ttft_s is not None
        assert slos.tbt_s is not None
        answer_s = self.sizes.num_output_tokens * slos.tbt_s
        num_requests = math.ceil(rate_per_s * (NUM_QUEUES * slos.ttft_s + NUM_ANSWERS * answer_s))
        return self.play(rate_per_s, min(max(num_requests, FEWEST_REQUESTS), most_requests), nth_seed)


def of_trace(by_seed: Sequence[Sequence[TraceRequest]]) -> Workload:
    """Return the workload of a trace's first requests, played faster or slower to reach a rate.

    `by_seed` has the requests once for each seed, with arrivals that the seed draws. Raises TraceError.
    """
    requests = by_seed[0]
    if len(requests) < 2 or requests[-1].arrival_s <= requests[0].arrival_s:
        raise TraceError("the trace has no rate: its requests arrive at one time")

    def play(rate_per_s: float, num_requests: int, nth_seed: int) -> Iterator[TraceRequest]:
        played = by_seed[nth_seed][:num_requests]
        span_s = played[-1].arrival_s - played[0].arrival_s
        return at_speed(played, rate_per_s * span_s / len(played))

    return _workload(play, requests)


def of_synthetic(load: SyntheticLoad, seed: int, most_requests: int) -> Workload:
    """Return the workload of a synthetic load, at any rate. `seed` is the first seed."""

    def play(rate_per_s: float, num_requests: int, nth_seed: int) -> Iterator[TraceRequest]:
        at_rate = msgspec.structs.replace(load, rate_per_s=rate_per_s)
        return itertools.islice(synthesize(at_rate, seed + nth_seed), num_requests)

    return _workload(play, list(play(load.rate_per_s, most_requests, 0)))


def _workload(play: Play, requests: Sequence[TraceRequest]) -> Workload:
    mean_tokens = (
        fmean(request.num_input_tokens for request in requests),
        fmean(request.num_output_tokens for request in requests),
    )
    return Workload(
        play,
        Sizes(*mean_tokens),
        max(request.num_input_tokens + request.num_output_tokens for request in requests),
    )
