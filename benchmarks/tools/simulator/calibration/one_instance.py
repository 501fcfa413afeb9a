"""The costs of one instance with both roles, measured by closed loops on the running server.

    one by one, short and long prompts   the time to a first token without computing, prefills, how iterations
                                         vary
    several at a time                    iterations with more requests, and with prompts

Front, Conductor and messenger share the machine's cores with the instance. So everything takes longer than in
the profile, and the more tokens an iteration draws, the more there is to send. The loops are also simulated.
The costs are those with which the simulated loops take as long as the measured ones.

Owns: the loops, and the costs that follow from their outcomes. Does not know: how they are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.calibration.costs import Calibration, times
from benchmarks.tools.simulator.calibration.loops import (
    Loop,
    MixedLoop,
    decode_seconds,
    gap_seconds,
    longest_mean,
    mean_ttft,
)
from benchmarks.tools.simulator.cluster.closed_loops import ClosedLoop
from benchmarks.tools.simulator.real_server import DEFAULT, PATIENT_S, PATIENT_TBT_S
from benchmarks.tools.simulator.this_machine import simulated_server
from benchmarks.tools.traces.request import TraceRequest
from conductor.settings import Limits
from mooncake.messages.costs import Costs

SHORT, LONG, CHATS, MANY, DOCUMENTS = "short", "long", "chats", "many", "documents"
ALONE: dict[str, Loop] = {
    SHORT: Loop(128, 48, concurrency=1, num_requests=8, seed=111),
    LONG: Loop(1024, 48, concurrency=1, num_requests=5, seed=112),
}
"""The loops with one request at a time."""
BUSY: dict[str, MixedLoop] = {
    CHATS: MixedLoop(
        CHATS, (128.0, 256.0, 512.0), (32.0, 64.0, 96.0), concurrency=8, num_requests=24, seed=113
    ),
    MANY: MixedLoop(MANY, (32.0, 64.0, 128.0), (32.0, 64.0, 96.0), concurrency=24, num_requests=60, seed=114),
    DOCUMENTS: MixedLoop(
        DOCUMENTS, (1000.0, 1500.0, 2000.0), (32.0, 64.0, 96.0), concurrency=4, num_requests=12, seed=115
    ),
}
"""The loops with several requests at a time."""
LOOPS: dict[str, Loop | MixedLoop] = {**ALONE, **BUSY}
_NUM_STEPS = 5
_STEP = 0.02


class Factors(NamedTuple):
    """The costs that are fitted."""

    prefill: float = 1.0
    """The factor of the costs of prompts while nothing is decoded."""
    beside: float = 1.0
    """The factor of the costs of prompt tokens beside decoding."""
    decode: float = 1.0
    """The factor of all costs of decode."""
    token_s: float = 1e-3
    """Seconds that each request adds to an iteration besides, because its token is sent."""
    latency_s: float = 0.01
    """Seconds before a first token that are not computing."""


def calibrated(profiled: tuple[Costs, Costs], outcomes: Mapping[str, Sequence[Outcome]]) -> Calibration:
    """Return the calibration that follows from the outcomes of all `LOOPS`. Rejected requests are ignored."""
    finished = {name: [o for o in outcomes[name] if o.kind is Kind.FINISHED] for name in LOOPS}
    alone = [outcome for name in ALONE for outcome in finished[name]]
    loops = [
        ClosedLoop(loop.concurrency, [_request(outcome) for outcome in finished[name]])
        for name, loop in LOOPS.items()
    ]

    def machine(factors: Factors) -> Calibration:
        decode = times(factors.decode, profiled[1])
        return Calibration(
            profiled,
            times(factors.prefill, profiled[0]),
            decode._replace(first_s=decode.first_s + factors.token_s),
            times(factors.beside, profiled[0]),
            factors.latency_s,
            longest_mean(alone),
            fmean(map(gap_seconds, alone)),
        )

    def simulated(factors: Factors) -> list[float]:
        return _simulated(machine(factors), loops)

    return machine(fitted(simulated, _measured(finished)))


def fitted(simulated: Callable[[Factors], list[float]], measured: Sequence[float]) -> Factors:
    """Return the factors with which the simulated figures are nearest to the measured ones.

    Errors are relative, and the sum of their squares is minimized (Gauss and Newton). No factor is negative.
    """
    factors, scales = np.array(Factors()), np.array(measured)
    steps = _STEP * factors
    for _ in range(_NUM_STEPS):
        found = np.array(simulated(Factors(*factors)))
        changes = [
            (np.array(simulated(Factors(*(factors + change)))) - found) / scales for change in np.diag(steps)
        ]
        slopes = np.array(changes).T / steps
        moved, *_ = np.linalg.lstsq(slopes, (scales - found) / scales, rcond=None)
        factors = np.maximum(factors + moved, 0.0)
    return Factors(*factors.tolist())


def _request(outcome: Outcome) -> TraceRequest:
    return TraceRequest(0.0, outcome.num_input_tokens, outcome.num_output_tokens)


def _measured(finished: Mapping[str, Sequence[Outcome]]) -> list[float]:
    """Return the figures of all loops: a mean gap and another time.

    The other time is the mean TTFT of requests that are alone, or the mean time of an answer: where prompts
    wait for each other, a TTFT says less of costs than of their order.
    """
    figures = []
    for name, of_loop in finished.items():
        figures.append(sum(map(decode_seconds, of_loop)) / sum(o.num_output_tokens - 1 for o in of_loop))
        figures.append(mean_ttft(of_loop) if name in ALONE else fmean(o.answered_s for o in of_loop))
    return figures


def _simulated(machine: Calibration, loops: Sequence[ClosedLoop]) -> list[float]:
    """Return the figures of `_measured` for simulated loops."""
    limits = Limits(ttft_slo_s=PATIENT_S, tbt_slo_s=PATIENT_TBT_S)
    results = simulated_server(DEFAULT, machine, limits).run_loops(loops)
    ttfts_s, answered_s = results["ttft_s"], results["end_s"] - results["arrival_s"]
    num_gaps = results["num_output_tokens"] - 1
    figures, end = [], 0
    for loop, name in zip(loops, LOOPS, strict=True):
        of = slice(end, end := end + len(loop.requests))
        figures.append(float((answered_s - ttfts_s)[of].sum() / num_gaps[of].sum()))
        figures.append(float((ttfts_s if name in ALONE else answered_s)[of].mean()))
    return figures
