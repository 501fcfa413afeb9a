"""Pictures of simulations: how times are distributed, the load and the hit rate over time, goodput against
the rate.

Owns: matplotlib. Does not know: how figures are computed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.simulator.report import SimulatedRun
from benchmarks.simulator.requests import Results
from benchmarks.simulator.series import LoadSeries
from benchmarks.simulator.summary import SLOs

LATENCIES_FILE, LOAD_FILE, GOODPUT_FILE = "latencies.svg", "load.svg", "goodput.svg"
_WINDOW_S = 60.0
_MOST_POINTS = 1000


class Drawn(NamedTuple):
    """One run. `series` is None for clusters that have no pools of instances."""

    run: SimulatedRun
    results: Results
    series: LoadSeries | None


def draw(drawn: Sequence[Drawn], slos: SLOs, folder: Path) -> None:
    """Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    draw_latencies(drawn, slos, folder / LATENCIES_FILE)
    draw_load(drawn, folder / LOAD_FILE)
    if len({d.run.rate_per_s for d in drawn}) > 1:
        draw_goodput(drawn, folder / GOODPUT_FILE)


def draw_latencies(drawn: Sequence[Drawn], slos: SLOs, path: Path) -> None:
    """CDFs; shares are of all requests: what was rejected never gets there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, slo_s in ((panels[0], "ttft_s", slos.ttft_s), (panels[1], "tbt_s", slos.tbt_s)):
        for run, results, _ in drawn:
            values = results[name]
            ordered = np.sort(values[~np.isnan(values)])
            shown = np.linspace(0, max(0, len(ordered) - 1), min(len(ordered), _MOST_POINTS)).astype(int)
            shares = (shown + 1) / len(results)
            panel.plot(ordered[shown], shares, label=f"{run.cluster}, {run.load}")
        if slo_s is not None:
            panel.axvline(slo_s, color="grey", linestyle=":", label="SLO")
        panel.set(xlabel=f"{name.removesuffix('_s').upper()}, s", xscale="log", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests")
    panels[1].legend(fontsize="small")
    figure.savefig(path)


def draw_load(drawn: Sequence[Drawn], path: Path) -> None:
    """Of both pools, in relation to the SLOs, and the share of input tokens that was cached, a minute
    each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(drawn)), layout="constrained")
    for panel, (run, results, series) in zip(
        figure.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True
    ):
        if series is not None:
            minutes = series["time_s"] / 60
            panel.plot(minutes, series["prefill_load"], color="tab:green", label="prefill load")
            panel.plot(minutes, series["decode_load"], color="tab:orange", label="decode load")
        windows, shares = hit_rate_over_time(results)
        panel.plot(windows / 60, shares, color="grey", linestyle=":", label="input cached")
        panel.set(title=f"{run.cluster}, {run.load}", xlabel="minutes", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper left")
    figure.savefig(path)


def hit_rate_over_time(results: Results) -> tuple[np.ndarray, np.ndarray]:
    """Ends of windows, and the share of the input tokens of the requests that arrived in each that was
    cached."""
    windows = (results["arrival_s"] // _WINDOW_S).astype(int)
    num_cached = np.bincount(windows, results["num_cached_tokens"])
    num_input = np.bincount(windows, results["num_input_tokens"])
    (seen,) = np.nonzero(num_input)
    return _WINDOW_S * (seen + 1), num_cached[seen] / num_input[seen]


def draw_goodput(drawn: Sequence[Drawn], path: Path) -> None:
    """Effective requests a second against those that were offered."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for cluster in dict.fromkeys(d.run.cluster for d in drawn):
        points = sorted(
            (d.run.rate_per_s, d.run.summary.goodput_per_s) for d in drawn if d.run.cluster == cluster
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=cluster)
    most = max(d.run.rate_per_s for d in drawn)
    axes.plot([0, most], [0, most], color="grey", linestyle=":", label="all of them")
    axes.set(xlabel="offered, req/s", ylabel="goodput, req/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
