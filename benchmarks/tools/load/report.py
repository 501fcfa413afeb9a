"""The report of a benchmark's runs, for people and for programs.

Owns: the table, its notes, the JSON. Does not know: how figures are computed.
"""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import rich.console
import rich.table

from benchmarks.tools.load.measures import ClientSummary, Slo, Spread, Summary
from benchmarks.tools.load.outcomes import Outcome

PLAIN_WIDTH = 200
REPORT_FILE = "report.json"
OUTCOMES_FILE = "requests.jsonl.gz"


class Measured(msgspec.Struct, frozen=True):
    """The figures of one server under one load."""

    server: str
    load: str
    """The name of the load for people: a rate, a concurrency or the trace."""
    rate_per_s: float | None
    summary: Summary


class Report(msgspec.Struct, frozen=True):
    """All of a command's runs."""

    command: str
    started_at: str
    slo: Slo
    runs: list[Measured]


def print_report(report: Report) -> None:
    """Print a table, and below it notes with facts that the table does not show."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=PLAIN_WIDTH)
    table = rich.table.Table()
    for column in ("load", "server", "requests", "rejected", "failed", "TTFT p50 / p99", "TBT p50 / p99"):
        table.add_column(column)
    for column in ("goodput", "within SLO", "output tok/s", "cached"):
        table.add_column(column)
    for run in report.runs:
        table.add_row(*_cells(run))
    console.print(table)
    slo = report.slo
    console.print(
        f"Goodput: requests a second that finished with TTFT within {slo.ttft_s:g} s and TBT within "
        f"{slo.tbt_s:g} s. "
        "TBT: of a request, the mean of its longest 10% of token gaps."
    )
    for run in report.runs:
        for note in _notes(run.summary, slo):
            console.print(f"{run.load}, {run.server}: {note}", markup=False)


def save_report(report: Report, outcomes: Iterable[tuple[str, str, Sequence[Outcome]]], folder: Path) -> None:
    """Write `report.json`, and in `requests.jsonl.gz` the server, load and outcome of each request."""
    (folder / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    with gzip.open(folder / OUTCOMES_FILE, "wb") as lines:
        for server, load, of_run in outcomes:
            for outcome in of_run:
                fields = {"server": server, "load": load, **msgspec.to_builtins(outcome)}
                lines.write(msgspec.json.encode(fields) + b"\n")


def _cells(run: Measured) -> list[str]:
    of_run = run.summary
    return [
        *(run.load, run.server, str(of_run.num_requests), str(of_run.num_rejected), str(of_run.num_failed)),
        *(_two(of_run.ttft_s), _two(of_run.tbt_s)),
        f"{of_run.goodput_per_s:.2f} req/s of {of_run.offered_per_s:.2f}",
        f"{of_run.attainment:.1%}",
        f"{of_run.output_tokens_per_s:.0f}",
        "" if of_run.cached_share is None else f"{of_run.cached_share:.1%}",
    ]


def _two(spread: Spread | None) -> str:
    return "" if spread is None else f"{seconds(spread.p50)} / {seconds(spread.p99)}"


def seconds(value_s: float) -> str:
    """Return a time as text, such as 15.2 ms or 3.41 s."""
    return f"{1000 * value_s:.1f} ms" if value_s < 1 else f"{value_s:.2f} s"


def _notes(of_run: Summary, slo: Slo) -> Iterable[str]:
    if of_run.was_interrupted:
        yield f"interrupted after {of_run.duration_s:.1f} s; {of_run.num_unfinished} requests were under way"
    if len(of_run.by_class) > 1:
        yield f"from {slo.long_from} input tokens a request is long; " + "; ".join(
            f"{name}: {of_class.num_requests} requests, {of_class.attainment:.1%} within SLO, "
            f"{of_class.num_rejected} rejected"
            for name, of_class in of_run.by_class.items()
        )
    if of_run.rejected_after_s is not None:
        yield f"rejections came after {_two(of_run.rejected_after_s)} (p50 / p99)"
    if of_run.num_too_long:
        yield f"{of_run.num_too_long} requests left out: longer than the server's context"
    for error, count in of_run.errors.items():
        yield f"{count} failed: {error}"
    yield _client_note(of_run.client)


def _client_note(client: ClientSummary) -> str:
    lag = "" if client.lag_s is None else f", sends {_two(client.lag_s)} (p50 / p99) behind schedule"
    who = "1 process," if client.num_processes == 1 else f"{client.num_processes} processes, the busiest"
    note = f"client: {who} at {client.max_cpu_share:.0%} of a core{lag}"
    if client.is_limit:
        note += ". THE CLIENT WAS LATE: use more --processes, or a machine that does nothing else"
    return note
