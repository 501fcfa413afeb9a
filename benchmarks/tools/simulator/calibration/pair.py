"""The costs of a pair of instances on one machine, measured by closed loops on the running server.

    one by one, short and long prompts   the time to a first token without computing; how much longer prefills
                                         and iterations take than in the profile; how iterations vary
    several at a time, three lengths     how much longer prefills and iterations take while the other instance
                                         computes too; the cost of a request that joins a batch; the time for
                                         which a prompt occupies its instance outside of passes

These loops were chosen after the outcomes of two replays were known.

Owns: the loops, and the costs that follow from their outcomes. Does not know: how they are sent, simulations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.calibration.costs import Calibration, non_negative, times
from benchmarks.tools.simulator.calibration.loops import (
    Loop,
    gap_seconds,
    longest_mean,
    mean_ttft,
    prefill_seconds,
)
from benchmarks.tools.simulator.cluster.shape import JoinCosts
from mooncake.messages.costs import Costs

SHORT, LONG, BUSY, BUSY_SHORT, BUSY_LONG = "short", "long", "busy", "busy-short", "busy-long"


LOOPS = {
    SHORT: Loop(128, 48, concurrency=1, num_requests=16, seed=101),
    LONG: Loop(1024, 48, concurrency=1, num_requests=8, seed=102),
    BUSY: Loop(512, 48, concurrency=4, num_requests=24, seed=103),
    BUSY_SHORT: Loop(128, 48, concurrency=8, num_requests=48, seed=104),
    BUSY_LONG: Loop(1536, 48, concurrency=4, num_requests=16, seed=105),
}
BUSY_LOOPS = (BUSY_SHORT, BUSY, BUSY_LONG)
"""The loops with so many requests at a time that a prompt is being computed all the time."""


def calibrated(profiled: tuple[Costs, Costs], outcomes: Mapping[str, Sequence[Outcome]]) -> Calibration:
    """Return the calibration that follows from the outcomes of all `LOOPS`. Rejected requests are ignored."""
    prefill, decode = profiled
    finished = {
        name: [outcome for outcome in outcomes[name] if outcome.kind is Kind.FINISHED] for name in LOOPS
    }
    short, long = finished[SHORT], finished[LONG]
    # TTFT = latency_s + prefill_factor * what the profile says, at two lengths.
    short_s, long_s = (prefill_seconds(prefill, LOOPS[name].num_input_tokens) for name in (SHORT, LONG))
    short_ttft_s, long_ttft_s = mean_ttft(short), mean_ttft(long)
    prefill_factor = (long_ttft_s - short_ttft_s) / (long_s - short_s)
    latency_s = max(0.0, short_ttft_s - prefill_factor * short_s)
    iterations_s = [decode.seconds(1, _mean_context(LOOPS[name])) for name in (SHORT, LONG)]
    gaps_s = [_mean_gap_s(of) for of in (short, long)]
    decode_factor = fmean(
        gap_s / iteration_s for gap_s, iteration_s in zip(gaps_s, iterations_s, strict=True)
    )
    corrected = times(prefill_factor, prefill), times(decode_factor, decode)
    busy = [_Busy.of(LOOPS[name], finished[name], *corrected) for name in BUSY_LOOPS]
    decode_slowdown, join_costs = _fitted_gaps(busy)
    prefill_slowdown, busy_prompt_s = _fitted_prefills(busy)
    prompt_s = min(busy_prompt_s, latency_s)
    return Calibration(
        profiled,
        *corrected,
        corrected[0],
        latency_s - prompt_s,
        longest_mean((*short, *long)),
        fmean(gaps_s),
        prompt_s,
        (prefill_slowdown, decode_slowdown),
        join_costs,
        busy_prompt_s,
    )


@dataclass(frozen=True, slots=True)
class _Busy:
    """The measurements of a busy loop: `gap_s` between tokens, and a first token every `each_s` seconds."""

    num_input_tokens: int
    num_decoding: float
    gap_s: float
    iteration_s: float
    """Seconds of an undisturbed iteration with `num_decoding` requests."""
    each_s: float
    prefill_s: float
    """Seconds of the passes of an undisturbed prefill."""

    @classmethod
    def of(cls, loop: Loop, outcomes: Sequence[Outcome], prefill: Costs, decode: Costs) -> Self:
        """Return the measurements of `loop`.

        `prefill` and `decode` are the costs of an undisturbed instance.
        """
        firsts_s = sorted(o.scheduled_s + o.ttft_s for o in outcomes if o.ttft_s is not None)
        each_s = (firsts_s[-1] - firsts_s[0]) / (len(firsts_s) - 1)
        gap_s = _mean_gap_s(outcomes)
        num_decoding = gap_s * (loop.num_output_tokens - 1) / each_s
        size = max(1.0, num_decoding)
        iteration_s = decode.seconds(size, size * _mean_context(loop))
        prefill_s = prefill_seconds(prefill, loop.num_input_tokens)
        return cls(loop.num_input_tokens, num_decoding, gap_s, iteration_s, each_s, prefill_s)


def _fitted_gaps(busy: Sequence[_Busy]) -> tuple[float, JoinCosts]:
    """Fit the gaps between tokens of the busy loops.

    The model is `gap_s = slowdown * iteration_s + joins * (constant_s + token_s * num_input_tokens)`, where
    `joins` is the number of requests that join the batch during a gap. Returns the slowdown, at least 1, and
    the costs of a request that joins.
    """
    joins = [b.gap_s / b.each_s for b in busy]
    rows = [
        (b.iteration_s, num_joins, num_joins * b.num_input_tokens)
        for b, num_joins in zip(busy, joins, strict=True)
    ]
    added, constant_s, token_s = non_negative(
        rows, [b.gap_s - b.iteration_s for b in busy], [b.gap_s for b in busy]
    )
    return 1 + added, JoinCosts(constant_s, token_s)


def _fitted_prefills(busy: Sequence[_Busy]) -> tuple[float, float]:
    """Fit the seconds from one first token to the next in the busy loops.

    The model is `each_s = factor * prefill_s + constant_s`, where `factor` is the slowdown while a request is
    being decoded, and 1 at other times. Returns the slowdown, at least 1, and the constant.
    """
    rows = [(b.prefill_s * min(1.0, b.num_decoding), 1.0) for b in busy]
    added, constant_s = non_negative(rows, [b.each_s - b.prefill_s for b in busy], [b.each_s for b in busy])
    return 1 + added, constant_s


def _mean_context(loop: Loop) -> float:
    return loop.num_input_tokens + loop.num_output_tokens / 2


def _mean_gap_s(outcomes: Sequence[Outcome]) -> float:
    return fmean(map(gap_seconds, outcomes))
