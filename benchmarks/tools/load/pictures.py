"""Pictures of a benchmark: the distributions of TTFT and TBT, and goodput against the rate of arrivals.

Owns: which pictures there are, and their files. Does not know: how figures are computed and drawn.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tools.load.measures import Slo
from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.load.report import Measured
from benchmarks.tools.pictures import Latencies, goodput_figure, latencies_figure

CDF_FILE, GOODPUT_FILE = "latencies.svg", "goodput.svg"


def draw(
    runs: Sequence[Measured], outcomes: Sequence[Sequence[Outcome]], slo: Slo, folder: Path
) -> list[Path]:
    """Draw the pictures into `folder`, and return the written files. Raises ImportError without matplotlib.

    `outcomes` has a list for each of `runs`.
    """
    import matplotlib as mpl

    mpl.use("svg")
    latencies = [_latencies(run, of_run) for run, of_run in zip(runs, outcomes, strict=True)]
    latencies_figure(latencies, slo.ttft_s, slo.tbt_s).savefig(folder / CDF_FILE)
    drawn = [folder / CDF_FILE]
    if len({run.rate_per_s for run in runs if run.rate_per_s is not None}) > 1:
        goodput_figure(goodput_curves(runs)).savefig(folder / GOODPUT_FILE)
        drawn.append(folder / GOODPUT_FILE)
    return drawn


def goodput_curves(runs: Sequence[Measured]) -> dict[str, list[tuple[float, float]]]:
    """Return the curve of each server: pairs of the rate of arrivals and the goodput, in requests a second.

    The rate is the measured one, which can differ from the requested one.
    """
    of_rates = [run for run in runs if run.rate_per_s is not None]
    return {
        server: [
            (run.summary.offered_per_s, run.summary.goodput_per_s) for run in of_rates if run.server == server
        ]
        for server in dict.fromkeys(run.server for run in of_rates)
    }


def _latencies(run: Measured, outcomes: Sequence[Outcome]) -> Latencies:
    """Return the latencies of a run, without requests that were cut off at its end."""
    ended = [outcome for outcome in outcomes if outcome.kind is not Kind.UNFINISHED]
    finished = [outcome for outcome in ended if outcome.kind is Kind.FINISHED]
    return Latencies(
        f"{run.server}, {run.load}",
        [outcome.ttft_s for outcome in finished if outcome.ttft_s is not None],
        [outcome.tbt_s for outcome in finished if outcome.tbt_s is not None],
        len(ended),
    )
