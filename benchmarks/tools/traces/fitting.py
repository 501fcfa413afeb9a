"""Figures of a trace, and the parameters of a synthetic load that resembles it.

The estimators keep a table of all block ids to find shared prefixes. So memory grows with the number of
different blocks.

Owns: the estimators. Does not know: files, and how loads are made from the parameters (`synthetic`).
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceError, TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, Values

NUM_PARTS = 64
"""The number of values by which a distribution is described."""
SHARED_BY = 0.5
"""The share of prompts that must begin with a block for the block to count as shared by all."""
WINDOW_S = 30.0
"""Seconds of the windows in which arrivals are counted for the burstiness. Ticks of traces are shorter."""


class TraceSummary(NamedTuple):
    """Figures of a trace.

    Hit rates are those of one cache of unlimited size, for blocks and for their tokens.
    """

    num_requests: int
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    block_hit_rate: float
    token_hit_rate: float


class Fit(NamedTuple):
    summary: TraceSummary
    load: SyntheticLoad


class _Known(NamedTuple):
    """The latest request in which a block was seen."""

    arrival_s: float
    num_input_tokens: int


def fit(requests: Iterable[TraceRequest]) -> Fit:
    """Return the figures and the synthetic load of a trace.

    Raises TraceError for fewer than two arrival times.
    """
    trace = list(requests)
    if len(trace) < 2 or trace[-1].arrival_s <= trace[0].arrival_s:
        raise TraceError(
            "a trace with requests at two different times at least is needed to fit a load to it"
        )
    num_shared = _num_shared_blocks(trace)
    known: dict[int, _Known] = {}
    num_hits = num_blocks = num_hit_tokens = 0
    first_input_tokens: list[float] = []
    turn_gap_s: list[float] = []
    kept_share: list[float] = []
    added_input_tokens: list[float] = []
    for request in trace:
        num_found = _num_found(request.hash_ids, known)
        num_hits += num_found
        num_blocks += len(request.hash_ids)
        num_hit_tokens += min(num_found * BLOCK_TOKENS, request.num_input_tokens)
        if num_found > num_shared:
            followed = known[request.hash_ids[num_found - 1]]
            # A partial block that is found again is the same prompt again; it cannot be kept in a longer one.
            num_kept = min(num_found, followed.num_input_tokens // BLOCK_TOKENS)
            turn_gap_s.append(request.arrival_s - followed.arrival_s)
            kept_share.append(num_kept / max(1, followed.num_input_tokens // BLOCK_TOKENS))
            added_input_tokens.append(max(1, request.num_input_tokens - num_kept * BLOCK_TOKENS))
        else:
            first_input_tokens.append(request.num_input_tokens)
        seen = _Known(request.arrival_s, request.num_input_tokens)
        known.update(dict.fromkeys(request.hash_ids, seen))
    duration_s = trace[-1].arrival_s - trace[0].arrival_s
    summary = TraceSummary(
        len(trace),
        duration_s,
        statistics.fmean(request.num_input_tokens for request in trace),
        statistics.fmean(request.num_output_tokens for request in trace),
        num_hits / max(1, num_blocks),
        num_hit_tokens / sum(request.num_input_tokens for request in trace),
    )
    load = SyntheticLoad(
        rate_per_s=(len(trace) - 1) / duration_s,
        first_input_tokens=values_of(first_input_tokens),
        output_tokens=values_of([request.num_output_tokens for request in trace]),
        burstiness=_burstiness([request.arrival_s for request in trace]),
        shared_prefix_tokens=num_shared * BLOCK_TOKENS,
        follow_up_share=len(turn_gap_s) / len(trace),
        max_input_tokens=max(request.num_input_tokens for request in trace),
    )
    if turn_gap_s:
        load = msgspec.structs.replace(
            load,
            turn_gap_s=values_of(turn_gap_s),
            kept_share=values_of(kept_share),
            added_input_tokens=values_of(added_input_tokens),
        )
    return Fit(summary, load)


def values_of(samples: Sequence[float]) -> Values:
    """Return the means of equally large parts of the sorted samples, at most `NUM_PARTS`."""
    ordered = sorted(samples)
    num_parts = min(NUM_PARTS, len(ordered))
    bounds = [len(ordered) * part // num_parts for part in range(num_parts + 1)]
    means = (statistics.fmean(ordered[start:end]) for start, end in itertools.pairwise(bounds))
    return tuple(float(f"{mean:.6g}") for mean in means)


def _num_found(hash_ids: Sequence[int], known: dict[int, _Known]) -> int:
    for index, block in enumerate(hash_ids):
        if block not in known:
            return index
    return len(hash_ids)


def _num_shared_blocks(trace: Sequence[TraceRequest]) -> int:
    """Return the number of leading blocks that at least `SHARED_BY` of all prompts have."""
    for index in range(max(len(request.hash_ids) for request in trace)):
        at_index = Counter(request.hash_ids[index] for request in trace if index < len(request.hash_ids))
        if at_index.most_common(1)[0][1] < SHARED_BY * len(trace):
            return index
    return 0


def _burstiness(arrivals_s: Sequence[float]) -> float:
    """Return the variance of the number of arrivals in windows of `WINDOW_S`, divided by its mean.

    With fewer than 10 windows the result is 1.
    """
    num_windows = math.floor((arrivals_s[-1] - arrivals_s[0]) / WINDOW_S)
    if num_windows < 10:
        return 1.0
    counts = Counter(math.floor((arrival_s - arrivals_s[0]) / WINDOW_S) for arrival_s in arrivals_s)
    in_windows = [counts[window] for window in range(num_windows)]
    return statistics.pvariance(in_windows) / statistics.fmean(in_windows)
