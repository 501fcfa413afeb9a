"""The report of a simulation: a table for people, JSON for programs.

Owns: both forms. Does not know: how figures are computed.
"""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.tools.simulator.summary import Distribution, Summary
from conductor.performance.objective import Terms, Weights

REPORT_FILE = "report.json"


class SimulatedRun(msgspec.Struct, frozen=True):
    """The figures of one load on one cluster. `reasons` counts rejections by their reason."""

    cluster: str
    load: str
    rate_per_s: float
    """The rate of arrivals in requests a second."""
    summary: Summary
    terms: Terms
    """The terms of BanaServe's objective."""
    reasons: dict[str, int]
    num_events: int
    seconds: float
    """Seconds that the simulation took."""
    conductor: dict[str, float] | None = None
    """Counts of the Conductor; None for clusters without a Conductor."""


class Report(msgspec.Struct, frozen=True):
    """The description of a simulation, and the results of its runs."""

    command: str
    settings: dict[str, Any]
    runs: list[SimulatedRun]
    weights: Weights | None = None
    """The weights of BanaServe's objective; None if it is not wanted."""

    def save(self, folder: Path) -> None:
        """Write the report as JSON."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / REPORT_FILE).write_bytes(content + b"\n")


def print_report(report: Report, console: Console) -> None:
    """Print a table with one column for each run."""
    table = Table(title="simulated: " + ", ".join(dict.fromkeys(run.cluster for run in report.runs)))
    table.add_column("")
    for run in report.runs:
        table.add_column(run.load, justify="right")
    for name, cells in _rows(report):
        table.add_row(name, *cells)
    console.print(table)
    for run in report.runs:
        for reason, number in sorted(run.reasons.items(), key=lambda item: -item[1])[:5]:
            console.print(f"{run.load}: {number:,} rejected, {reason}", markup=False)


def _rows(report: Report) -> list[tuple[str, list[str]]]:
    runs = report.runs

    def row(name: str, show: Any) -> tuple[str, list[str]]:
        return name, [show(run.summary) for run in runs]

    return [
        row("requests", lambda s: f"{s.num_requests:,}"),
        row(
            "finished / rejected / failed",
            lambda s: f"{s.num_finished:,} / {s.num_rejected:,} / {s.num_failed:,}",
        ),
        row("effective", lambda s: f"{s.num_effective:,} ({s.effective_share:.1%})"),
        row("goodput, req/s", lambda s: f"{s.goodput_per_s:.2f}"),
        row("TTFT mean / p50 / p90 / p99, s", lambda s: _times(s.ttft_s, 1, 2)),
        row("TBT mean / p50 / p90 / p99, ms", lambda s: _times(s.tbt_s, 1000, 1)),
        row("within TTFT / TBT SLO", lambda s: f"{s.ttft_attainment:.1%} / {s.tbt_attainment:.1%}"),
        row("input cached / fetched", lambda s: f"{s.cached_share:.1%} / {s.fetched_share:.1%}"),
        row("device time of a prefill, s", lambda s: f"{s.prefill_s_per_request:.3f}"),
        *_objective(runs, report.weights),
        *_elastic(runs),
        ("events", [f"{run.num_events:,}" for run in runs]),
        ("events/s", [f"{run.num_events / max(run.seconds, 1e-9):,.0f}" for run in runs]),
        ("simulated in, s", [f"{run.seconds:.1f}" for run in runs]),
    ]


def _objective(runs: list[SimulatedRun], weights: Weights | None) -> list[tuple[str, list[str]]]:
    """Return the rows of BanaServe's objective: its terms, and with weights its value."""
    rows = [
        ("U_avg", [f"{run.terms.utilisation:.1%}" for run in runs]),
        ("T_avg-latency, s", [f"{run.terms.latency_s:.3f}" for run in runs]),
        ("Theta, output tokens/s", [f"{run.terms.output_tokens_per_s:,.0f}" for run in runs]),
    ]
    if weights is not None:
        rows.append(("J", [f"{run.terms.objective(weights):.4g}" for run in runs]))
    return rows


def _elastic(runs: list[SimulatedRun]) -> list[tuple[str, list[str]]]:
    """Return the rows about changes of roles and moves of requests; none if nothing changed or moved."""
    counts = [run.conductor or {} for run in runs]
    if not any(of.get("num_switches") or of.get("num_moves") for of in counts):
        return []
    cells = [f"{of.get('num_switches', 0):.0f} / {of.get('num_moves', 0):.0f}" for of in counts]
    return [("changes of roles / moves of requests", cells)]


def _times(times: Distribution, factor: float, digits: int) -> str:
    values = (times.mean, times.p50, times.p90, times.p99)
    return " / ".join(f"{factor * value:.{digits}f}" for value in values)
