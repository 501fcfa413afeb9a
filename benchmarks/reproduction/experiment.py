"""The form of an experiment: a table of published values beside ours, and a remark that says where they
differ and why.

Owns: the vocabulary, and how an experiment is written down. Does not know: any experiment.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import TICK_S, at_speed, jittered
from benchmarks.tools.traces.request import TraceRequest

SWEEP_REQUESTS = 3000
"""The number of first requests of the trace that stand for the whole trace where many loads are compared."""
SEED = 0

Cell = str | float | None


class Table(msgspec.Struct, frozen=True):
    """A table. Numbers are shown with three digits, None (where nothing was published) as an empty cell."""

    header: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """Return the whole table in Markdown."""
        lines = ["| " + " | ".join(self.header) + " |", "|---" * len(self.header) + "|"]
        lines += ["| " + " | ".join(map(_shown, row)) + " |" for row in self.rows]
        return "\n".join(lines)


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 or float(cell).is_integer() else f"{cell:.3g}"


class Outcome(msgspec.Struct, frozen=True):
    """The findings of an experiment."""

    tables: list[Table]
    pictures: list[str] = []
    """Names of the written files in the experiment's folder."""


def text_of(setup: Setup) -> str:
    """Return instances and model as text, for settings."""
    return f"{setup.name}, {setup.model}"


def number(cell: Cell) -> float:
    """Return the number of a cell that has one."""
    assert isinstance(cell, int | float)
    return float(cell)


def always(text: str) -> Callable[[Outcome], str]:
    """Return a function that makes a remark without figures, which no other run could change."""
    return lambda outcome: text


@dataclass(frozen=True, slots=True)
class Trace:
    """Mooncake's conversation trace (FAST'25)."""

    path: Path

    def load(
        self, speed: float = 1.0, num_requests: int | None = None, seed: int = SEED
    ) -> Iterator[TraceRequest]:
        """Yield the trace's first requests, each at a time within its tick of the trace's clock that `seed`
        draws."""
        requests = islice(jittered(TraceFile(self.path), TICK_S, seed), num_requests)
        return at_speed(requests, speed)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment. `run(trace, folder)` may write pictures into the folder. `remark` is made from the
    findings, so that it is true of the figures beside it."""

    name: str
    title: str
    published: str
    """The place of publication, and the result in a sentence."""
    setting: str
    remark: Callable[[Outcome], str]
    run: Callable[[Trace, Path], Outcome]
    cost: float = 1.0
    """The cost relative to other experiments. The longest experiment begins first."""
