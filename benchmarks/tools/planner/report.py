"""A plan as a table for people and as JSON for programs.

Owns: both forms. Does not know: how a plan is made.
"""

from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from benchmarks.tools.planner.price import Price
from benchmarks.tools.planner.questions import Question
from benchmarks.tools.planner.search import Candidate, Plan
from conductor.performance.objective import Weights

_GOODPUT_COLUMNS = (
    "devices\neach",
    "goodput,\nreq/s",
    "by\nseed",
    "TTFT\np90, s",
    "TBT\np90, ms",
    "late\nfirst",
)
_OBJECTIVE_COLUMNS = (
    "devices\neach",
    "goodput,\nreq/s",
    "J",
    "U_avg",
    "T_avg-\nlatency\nin s",
    "Theta,\ntokens/s",
)
_HINTS = {1: "for disaggregation", 0: "", -1: "against it"}


class Report(msgspec.Struct, frozen=True):
    """All findings of a command. `seconds` is how long the search took."""

    command: str
    settings: dict[str, Any]
    attainment: float
    plan: Plan
    questions: list[Question]
    advice: str
    price: Price | None
    seconds: float

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def print_report(report: Report, console: Console) -> None:
    """Print the clusters, the best one first, in 80 columns. The questions and the advice follow."""
    plan, best = report.plan, report.plan.best
    columns = _GOODPUT_COLUMNS if plan.weights is None else _OBJECTIVE_COLUMNS
    table = Table(
        title=f"{_title(plan.weights)}goodput: {report.attainment:.0%} of the requests within both SLOs",
        box=SIMPLE_HEAVY,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("cluster", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    same_size = [plan.disaggregated, plan.coupled, *plan.neighbours, *plan.others]
    ranked = sorted(
        (candidate for candidate in same_size if candidate is not None),
        key=lambda candidate: (candidate.is_bound, -plan.score(candidate)),
    )
    for candidate in ranked:
        table.add_row(*_row(plan, candidate), style="bold" if candidate is best else None)
    table.add_section()
    for candidate in plan.next_ones:
        table.add_row(*_row(plan, candidate))
    console.print(table)
    for question in report.questions:
        hint = _HINTS[question.hint]
        console.print(f"{question.text}: {question.answer}" + (f" ({hint})" if hint else ""), highlight=False)
    if report.price is not None:
        console.print(f"a million tokens cost {_costs(plan, report.price)}", highlight=False)
    console.print(f"{plan.num_simulations} simulations in {report.seconds:.0f} s", highlight=False)
    console.print(f"\n{report.advice}", highlight=False)


def _costs(plan: Plan, price: Price) -> str:
    compared = [candidate for candidate in (plan.disaggregated, plan.coupled) if candidate is not None]
    return ", ".join(
        f"{price.of_million_tokens(candidate):.3g} with {candidate.setup.name}" for candidate in compared
    )


def _spread(candidate: Candidate) -> str:
    if candidate.least_per_s == candidate.most_per_s:
        return ""
    return f"{candidate.least_per_s:.3g}-{candidate.most_per_s:.3g}"


def _row(plan: Plan, candidate: Candidate) -> list[str]:
    ttft_s, tbt_s = candidate.ttft_p90_s, candidate.tbt_p90_s
    first = [
        candidate.setup.name,
        f"{candidate.setup.num_gpus}",
        f"{'below ' if candidate.is_bound else ''}{candidate.goodput_per_s:.3g}",
    ]
    if plan.weights is not None:
        return first + _objective(candidate, plan.weights)
    return [
        *first,
        _spread(candidate),
        "" if ttft_s is None else f"{ttft_s:.2f}",
        "" if tbt_s is None else f"{1000 * tbt_s:.1f}",
        candidate.limit,
    ]


def _title(weights: Weights | None) -> str:
    if weights is None:
        return ""
    alpha, beta, gamma = weights
    return f"J = {alpha:g} U_avg - {beta:g} T_avg-latency + {gamma:g} Theta, at the goodput\n"


def _objective(candidate: Candidate, weights: Weights) -> list[str]:
    terms = candidate.terms
    if terms is None:
        return [""] * 4
    return [
        f"{terms.objective(weights):.4g}",
        f"{terms.utilisation:.1%}",
        f"{terms.latency_s:.3g}",
        f"{terms.output_tokens_per_s:.4g}",
    ]
