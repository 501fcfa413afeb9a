"""The form of an experiment: tables of published values and ours, and a remark about their differences.

Owns: the vocabulary, and how an experiment is written down. Does not know: any experiment.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import TICK_S, at_speed, jittered
from benchmarks.tools.traces.request import TraceRequest

SWEEP_REQUESTS = 3000
"""The number of the trace's first requests that stand for the whole trace if many loads are compared."""
SEED = 0
FIVE_SEEDS = range(SEED, SEED + 5)
"""The seeds of `mean_of`, as many as in BanaServe, section 5.1.3."""
_STUDENT_95 = 2.776
"""Student's t for five samples and a two-sided interval of 95%."""


class Mean(msgspec.Struct, frozen=True):
    """A mean, and the half width of its 95% confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        """Return the mean with three digits, and the half width with the same number of decimals."""
        largest = abs(self.mean) or self.half_width
        decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
        return f"{self.mean:,.{decimals}f} ± {self.half_width:,.{decimals}f}"


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of the values that `FIVE_SEEDS` gave."""
    assert len(values) == len(FIVE_SEEDS), "Student's t is that of five samples"
    return Mean(fmean(values), _STUDENT_95 * stdev(values) / math.sqrt(len(values)))


Cell = str | float | Mean | None


class Table(msgspec.Struct, frozen=True):
    """A table. Numbers are shown with three digits. None is an empty cell: nothing was published."""

    header: list[str]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> str:
        """Return the whole table in Markdown."""
        lines = ["| " + " | ".join(self.header) + " |", "|---" * len(self.header) + "|"]
        lines += ["| " + " | ".join(map(_shown, row)) + " |" for row in self.rows]
        return "\n".join(lines)


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str | Mean):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 or float(cell).is_integer() else f"{cell:.3g}"


class Outcome(msgspec.Struct, frozen=True):
    """The findings of an experiment: its tables and pictures."""

    tables: list[Table]
    pictures: list[str] = []
    """The names of the files that were written to the experiment's folder."""


def text_of(setup: Setup) -> str:
    """Return the text for settings that names instances and model."""
    return f"{setup.name}, {setup.model}"


def number(cell: Cell) -> float:
    """Return the number, or the mean, in a cell, which must have one."""
    if isinstance(cell, Mean):
        return cell.mean
    assert isinstance(cell, int | float)
    return float(cell)


def always(text: str) -> Callable[[Outcome], str]:
    """Return a function that makes a constant remark. It has no figures that another run could change."""
    return lambda outcome: text


@dataclass(frozen=True, slots=True)
class Trace:
    """Mooncake's conversation trace (FAST'25)."""

    path: Path

    def load(
        self, speed: float = 1.0, num_requests: int | None = None, seed: int = SEED
    ) -> Iterator[TraceRequest]:
        """Yield the trace's first requests. `seed` draws each arrival within its tick of the clock."""
        requests = islice(jittered(TraceFile(self.path), TICK_S, seed), num_requests)
        return at_speed(requests, speed)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment. `run(trace, folder)` may write pictures into the folder.

    `remark` is made from the findings, so that it is true of the figures.
    """

    name: str
    title: str
    published: str
    """The place of publication, and the published result in a sentence."""
    setting: str
    remark: Callable[[Outcome], str]
    run: Callable[[Trace, Path], Outcome]
    cost: float = 1.0
    """The cost relative to other experiments. The most costly experiment begins first."""
