"""Pictures of simulations: distributions of times, load and hit rate over time, goodput against the rate.

Owns: which pictures there are, their files, the load over time. Does not know: how figures are computed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.tools.pictures import Latencies, goodput_figure, latencies_figure
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.report import SimulatedRun
from benchmarks.tools.simulator.series import LoadSeries
from benchmarks.tools.simulator.summary import SLOs

LATENCIES_FILE, LOAD_FILE, GOODPUT_FILE = "latencies.svg", "load.svg", "goodput.svg"
_WINDOW_S = 60.0


class Drawn(NamedTuple):
    """One run with all that is drawn of it.

    `series` is None for clusters without separate prefill and decode instances.
    """

    run: SimulatedRun
    results: Results
    series: LoadSeries | None


def draw(drawn: Sequence[Drawn], slos: SLOs, folder: Path) -> None:
    """Draw all pictures. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    draw_latencies(drawn, slos, folder / LATENCIES_FILE)
    draw_load(drawn, folder / LOAD_FILE)
    if len({d.run.rate_per_s for d in drawn}) > 1:
        goodput_figure(goodput_curves(drawn)).savefig(folder / GOODPUT_FILE)


def draw_latencies(drawn: Sequence[Drawn], slos: SLOs, path: Path) -> None:
    """Draw the CDFs of TTFT and TBT to `path`. Shares are of all requests."""
    latencies_figure([_latencies(of_run) for of_run in drawn], slos.ttft_s, slos.tbt_s).savefig(path)


def _latencies(drawn: Drawn) -> Latencies:
    """Return the latencies of the finished requests of a run."""
    ttft_s, tbt_s = (drawn.results[name] for name in ("ttft_s", "tbt_s"))
    return Latencies(
        f"{drawn.run.cluster}, {drawn.run.load}",
        ttft_s[~np.isnan(ttft_s)],
        tbt_s[~np.isnan(tbt_s)],
        len(drawn.results),
    )


def draw_load(drawn: Sequence[Drawn], path: Path) -> None:
    """Draw prefill and decode load relative to the SLOs, and the cached share of input tokens, by minute."""
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
    """Return the ends of windows, and the cached share of the input tokens that arrived in each."""
    windows = (results["arrival_s"] // _WINDOW_S).astype(int)
    num_cached = np.bincount(windows, results["num_cached_tokens"])
    num_input = np.bincount(windows, results["num_input_tokens"])
    (seen,) = np.nonzero(num_input)
    return _WINDOW_S * (seen + 1), num_cached[seen] / num_input[seen]


def goodput_curves(drawn: Sequence[Drawn]) -> dict[str, list[tuple[float, float]]]:
    """Return each cluster's curve: pairs of the rate of arrivals and the goodput, in requests a second."""
    return {
        cluster: [(d.run.rate_per_s, d.run.summary.goodput_per_s) for d in drawn if d.run.cluster == cluster]
        for cluster in dict.fromkeys(d.run.cluster for d in drawn)
    }
