"""What an experiment is: a table of published values beside ours, and a remark that says where they differ
and why.

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
"""First requests of the trace, which stand for it where many loads are compared."""
SEED = 0

Cell = str | float | None


class Table(msgspec.Struct, frozen=True):
    """Numbers are shown with three digits; None where nothing was published."""

    header: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """The whole table in Markdown."""
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
    """What an experiment has found."""

    tables: list[Table]
    pictures: list[str] = []
    """Names of files in the folder that the experiment was given."""


def text_of(setup: Setup) -> str:
    """Instances and model, for settings."""
    return f"{setup.name}, {setup.model}"


def number(cell: Cell) -> float:
    """Return the number of a cell that has one."""
    assert isinstance(cell, int | float)
    return float(cell)


def always(text: str) -> Callable[[Outcome], str]:
    """A remark without figures that another run could change."""
    return lambda outcome: text


@dataclass(frozen=True, slots=True)
class Trace:
    """Mooncake's conversation trace (FAST'25)."""

    path: Path

    def load(
        self, speed: float = 1.0, num_requests: int | None = None, seed: int = SEED
    ) -> Iterator[TraceRequest]:
        """Yield the trace's first requests, without the ticks of its clock: `seed` draws where in a tick."""
        requests = islice(jittered(TraceFile(self.path), TICK_S, seed), num_requests)
        return at_speed(requests, speed)


@dataclass(frozen=True, slots=True)
class Experiment:
    """`run(trace, folder)` may write pictures into the folder. `remark` is made from what was found, so that
    it is true of the figures beside it."""

    name: str
    title: str
    published: str
    """Where the result was published, and what in a sentence."""
    setting: str
    remark: Callable[[Outcome], str]
    run: Callable[[Trace, Path], Outcome]
    cost: float = 1.0
    """Cost in relation to others: the one that takes longest begins first."""
