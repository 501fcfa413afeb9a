"""Overload policies: Mooncake (arXiv), Table 3 and Figures 9 and 10."""

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.reproduction.experiment import SWEEP_REQUESTS, Experiment, Outcome, Table, Trace
from benchmarks.simulator.pictures import Drawn, draw_load
from benchmarks.simulator.series import LoadSeries
from benchmarks.simulator.setup import Setup, simulate
from mooncake.config import Overload

PUBLISHED = {Overload.BASELINE: 4183, Overload.EARLY_REJECTION: 3771, Overload.PREDICTION: 3589}
SETUP = Setup(model="llama2-70b", num_prefill=8, num_decode=8, ttft_slo_s=30.0, tbt_slo_s=0.1)
SPEEDS = (2.0, 6.0)
"""that of the paper, and one that overloads these nodes as much"""
TIGHT_TBT_SLO_S = 0.03
"""with which decoding is what is short: the case of Figures 9 and 10"""


def run(trace: Trace, folder: Path) -> Outcome:
    """Rejections by policy at two speeds, then with a tight TBT SLO, where loads can swing."""
    header = ["policy", "rejected, published"]
    rows: dict[Overload, list[str | float | None]] = {
        policy: [policy.value, f"{published:,} of 23,000"] for policy, published in PUBLISHED.items()
    }
    for speed in SPEEDS:
        header += [f"ours at {speed:g}x", f"wasted prefills at {speed:g}x"]
        for policy, row in rows.items():
            setup = msgspec.structs.replace(SETUP, overload=policy)
            simulated, results = simulate(setup, trace.load(speed, SWEEP_REQUESTS))
            wasted = (results["prefill_s"] > 0) & np.isnan(results["ttft_s"])
            row += [simulated.summary.num_rejected, int(wasted.sum())]
    swings, picture = _swings(trace, folder)
    return Outcome([Table(header, list(rows.values())), swings], [picture])


def _swings(trace: Trace, folder: Path) -> tuple[Table, str]:
    drawn: list[Drawn] = []
    rows: list[list[str | float | None]] = []
    for policy in PUBLISHED:
        setup = msgspec.structs.replace(SETUP, overload=policy, tbt_slo_s=TIGHT_TBT_SLO_S)
        series = LoadSeries(setup.slos)
        simulated, results = simulate(setup, trace.load(SPEEDS[-1], SWEEP_REQUESTS), policy.value, series)
        drawn.append(Drawn(simulated, results, series))
        prefill, decode = (_middle(series[name]) for name in ("prefill_load", "decode_load"))
        together = float(np.corrcoef(prefill, decode)[0, 1])
        s = simulated.summary
        stds = float(prefill.std()), float(decode.std())
        rows.append([policy.value, s.num_rejected, s.num_effective, *stds, together])
    picture = "overload.svg"
    draw_load(drawn, folder / picture)
    header = ["policy", "rejected", "effective", "prefill load, std", "decode load, std", "correlation"]
    return Table(header, rows), picture


def _middle(load: np.ndarray) -> np.ndarray:
    """Without the beginning and the end."""
    return load[len(load) // 10 : -(len(load) // 10)]


EXPERIMENT = Experiment(
    "overload",
    "Overload policies",
    "Mooncake (arXiv), Table 3: rejected requests at twice the replay speed, 8P+8D; Figures 9 and 10: early"
    " rejection lets prefill and decode load swing in anti-phase, prediction damps that.",
    f"8P+8D, llama2-70b, TTFT SLO 30 s, TBT SLO 0.1 s; the first {SWEEP_REQUESTS:,} requests of the"
    " trace. A wasted"
    " prefill was computed, at least in part, for a request that was rejected. Second table: at"
    f" {SPEEDS[-1]:g}x with a TBT SLO of {1000 * TIGHT_TBT_SLO_S:.0f} ms; loads are the means over"
    " the pools.",
    "",
    run,
)
