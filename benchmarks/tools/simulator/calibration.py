"""What a profile of a worker alone does not know of a server: measured by closed loops on the running one.

    one by one, short and long prompts   what a first token takes besides computing, how much longer prefills
                                         and steps take than in the profile, how steps vary
    four at a time                       how much longer both take while the other instance computes as well

Which loops these are was chosen when the outcome of one replay was known. docs/simulator.md has a blind
prediction with them, and what they miss: the busy loop has prompts of one length.

Owns: the loops, and what follows from their outcomes. Does not know: how they are sent, simulations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.cluster.machines.costs import Profiled
from mooncake.messages.costs import Costs, prefill_quantities

SHORT, LONG, BUSY = "short", "long", "busy"


@dataclass(frozen=True, slots=True)
class Loop:
    """Requests of one size, so many at any time."""

    num_input_tokens: int
    num_output_tokens: int
    concurrency: int
    num_requests: int
    seed: int
    """The loop's own seed, so that no prompt is cached."""

    def flags(self) -> dict[str, object]:
        """Return the flags for `mooncake-bench run`."""
        return {
            "--lengths": f"{self.num_input_tokens}/{self.num_output_tokens}",
            "--concurrency": self.concurrency,
            "--num-requests": self.num_requests,
            "--seed": self.seed,
        }


LOOPS = {
    SHORT: Loop(128, 48, concurrency=1, num_requests=16, seed=101),
    LONG: Loop(1024, 48, concurrency=1, num_requests=8, seed=102),
    BUSY: Loop(512, 48, concurrency=4, num_requests=24, seed=103),
}
PASS_TOKENS = 512


class Corrected(Profiled):
    """Costs as on the running server; the Conductor is given the profile."""

    def __init__(self, profiled: tuple[Costs, Costs], prefill_factor: float, decode_factor: float) -> None:
        prefill, decode = profiled
        super().__init__(_times(prefill_factor, prefill), _times(decode_factor, decode))
        self.profiled = profiled


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured costs of one machine.

    `slowdowns` of prefill and decode beside each other; `longest_mean`: the mean of the longest tenth of a
    request's gaps, by the mean of all.
    """

    profiled: tuple[Costs, Costs]
    prefill_factor: float
    decode_factor: float
    first_token_s: float
    slowdowns: tuple[float, float]
    longest_mean: float

    @property
    def costs(self) -> Corrected:
        return Corrected(self.profiled, self.prefill_factor, self.decode_factor)


def calibrated(profiled: tuple[Costs, Costs], outcomes: Mapping[str, Sequence[Outcome]]) -> Calibration:
    """Return the calibration by the outcomes of all `LOOPS`; rejected requests tell nothing."""
    prefill, decode = profiled
    short, long, busy = (
        [outcome for outcome in outcomes[name] if outcome.kind is Kind.FINISHED]
        for name in (SHORT, LONG, BUSY)
    )
    # TTFT = first_token_s + prefill_factor * what the profile says, at two lengths.
    short_s, long_s = (_prefill_s(prefill, LOOPS[name].num_input_tokens) for name in (SHORT, LONG))
    short_ttft_s, long_ttft_s = _mean_ttft_s(short), _mean_ttft_s(long)
    prefill_factor = (long_ttft_s - short_ttft_s) / (long_s - short_s)
    first_token_s = max(0.0, short_ttft_s - prefill_factor * short_s)
    steps_s = [decode.seconds(1, _mean_context(LOOPS[name])) for name in (SHORT, LONG)]
    gaps_s = [_mean_gap_s(of) for of in (short, long)]
    decode_factor = fmean(gap_s / step_s for gap_s, step_s in zip(gaps_s, steps_s, strict=True))
    ratios = [o.tbt_s / _gap_s(o) for o in (*short, *long) if o.tbt_s is not None]
    # In the busy loop a prefill is always computed, and somebody is decoded for `beside` of the time.
    loop = LOOPS[BUSY]
    firsts_s = sorted(o.scheduled_s + o.ttft_s for o in busy if o.ttft_s is not None)
    each_s = (firsts_s[-1] - firsts_s[0]) / (len(firsts_s) - 1)
    num_decoding = _mean_gap_s(busy) * (loop.num_output_tokens - 1) / each_s
    batch_size, beside = max(1.0, num_decoding), min(1.0, num_decoding)
    alone_s = prefill_factor * _prefill_s(prefill, loop.num_input_tokens)
    step_s = decode_factor * decode.seconds(batch_size, batch_size * _mean_context(loop))
    prefill_slowdown = 1 + (each_s / alone_s - 1) / beside
    decode_slowdown = _mean_gap_s(busy) / step_s
    return Calibration(
        profiled,
        prefill_factor,
        decode_factor,
        first_token_s,
        (max(1.0, prefill_slowdown), max(1.0, decode_slowdown)),
        max(1.0, fmean(ratios)),
    )


def _prefill_s(costs: Costs, num_tokens: int) -> float:
    num_passes = -(-num_tokens // PASS_TOKENS)
    return costs.seconds(*prefill_quantities(num_tokens, 0)) + (num_passes - 1) * costs.constant_s


def _mean_context(loop: Loop) -> float:
    return loop.num_input_tokens + loop.num_output_tokens / 2


def _mean_ttft_s(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None)


def _gap_s(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None
    return (outcome.answered_s - outcome.ttft_s) / (outcome.num_output_tokens - 1)


def _mean_gap_s(outcomes: Sequence[Outcome]) -> float:
    return fmean(map(_gap_s, outcomes))


def _times(factor: float, costs: Costs) -> Costs:
    return Costs(*(factor * cost for cost in costs))
