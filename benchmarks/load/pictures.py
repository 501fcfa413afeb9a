"""Pictures of a benchmark: how TTFT and TBT are distributed, and goodput against the rate.

Owns: matplotlib. Does not know: how figures are computed.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.measures import Slo
from benchmarks.load.outcomes import Kind, Outcome
from benchmarks.load.report import Measured

CDF_FILE, GOODPUT_FILE = "latencies.svg", "goodput.svg"


def draw(
    runs: Sequence[Measured], outcomes: Sequence[Sequence[Outcome]], slo: Slo, folder: Path
) -> list[Path]:
    """The files written; `outcomes` are those of each run. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    drawn = [_latencies(runs, outcomes, slo, folder / CDF_FILE)]
    if len({run.rate_per_s for run in runs if run.rate_per_s is not None}) > 1:
        drawn.append(_goodput(runs, folder / GOODPUT_FILE))
    return drawn


def _latencies(runs: Sequence[Measured], outcomes: Sequence[Sequence[Outcome]], slo: Slo, path: Path) -> Path:
    """Shares are of all requests that ended: what was rejected or failed never gets there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, slo_s in ((panels[0], "ttft_s", slo.ttft_s), (panels[1], "tbt_s", slo.tbt_s)):
        for run, of_run in zip(runs, outcomes, strict=True):
            ended = [outcome for outcome in of_run if outcome.kind is not Kind.UNFINISHED]
            values = [getattr(o, name) for o in ended if o.kind is Kind.FINISHED]
            ordered = sorted(math.inf if value is None else value for value in values)
            shares = [(index + 1) / len(ended) for index in range(len(ordered))]
            known = sum(math.isfinite(value) for value in ordered)
            panel.step(ordered[:known], shares[:known], where="post", label=f"{run.server}, {run.load}")
        panel.axvline(slo_s, color="grey", linestyle=":", label="SLO")
        panel.set(xlabel=f"{name.removesuffix('_s').upper()}, s", xscale="log", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests")
    panels[1].legend(fontsize="small")
    figure.savefig(path)
    return path


def _goodput(runs: Sequence[Measured], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for server in dict.fromkeys(run.server for run in runs):
        points = sorted(
            (run.rate_per_s, run.summary.goodput_per_s)
            for run in runs
            if run.server == server and run.rate_per_s is not None
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=server)
    rates = [run.rate_per_s for run in runs if run.rate_per_s is not None]
    axes.plot([0, max(rates)], [0, max(rates)], color="grey", linestyle=":", label="all of them")
    axes.set(xlabel="offered, req/s", ylabel="goodput, req/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path
