"""The figures of several sides, and their tables.

Sides are measured in turn, so that other load on the machine is unfair to none of them.

Owns: rounds, medians, markdown. Does not know: what is measured.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from benchmarks.kvstore.workload import Op

GIB = 1 << 30
T = TypeVar("T")


class Sample(NamedTuple):
    """The figures of one round, or the medians of several rounds."""

    items_per_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, times_s: Sequence[float], items_per_call: int) -> "Sample":
        ordered = sorted(times_s)
        return cls(
            items_per_call * len(ordered) / sum(ordered),
            statistics.median(ordered),
            ordered[int(0.99 * (len(ordered) - 1))],
        )


class Timed(Protocol):
    """The interface of a side whose calls can be timed, in this process or in another process."""

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds of each call. A call has `depth` blocks."""


class Side(Timed, Protocol):
    """A store and its workload."""

    def open(self, block_bytes: int) -> None:
        """Fill the store with blocks of this size."""


def each_round(
    sides: Mapping[str, T], measure: Callable[[T], Sample], num_rounds: int
) -> dict[str, list[Sample]]:
    """Return each side's samples of all rounds. Each round starts with another side."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measure(sides[name]))
    return samples


def medians(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Sample]:
    """Return for each side the medians over its rounds."""
    return {
        name: Sample(*map(statistics.median, zip(*rounds, strict=True))) for name, rounds in samples.items()
    }


def share(samples: Mapping[str, Sequence[Sample]], name: str, other: str) -> float:
    """Return one side's throughput as a multiple of another side's: the median over rounds.

    The two are compared within a round, as a slow machine slows both.
    """
    pairs = zip(samples[name], samples[other], strict=True)
    return statistics.median([one.items_per_s / two.items_per_s for one, two in pairs])


def in_rounds(sides: Mapping[str, T], measure: Callable[[T], Sample], num_rounds: int) -> dict[str, Sample]:
    """Measure all sides in rounds, and return the medians of each side's samples."""
    return medians(each_round(sides, measure, num_rounds))


def time_sides(
    sides: Mapping[str, Timed], op: Op, depth: int, budget_s: float, num_rounds: int
) -> dict[str, Sample]:
    """Measure the same operation on every side. The items of the samples are blocks."""
    return in_rounds(sides, lambda side: Sample.of(side.time(op, depth, budget_s), depth), num_rounds)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> None:
    """Print a markdown table under a heading, then its notes."""
    print(f"\n## {title}\n")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    for note in notes:
        print(f"\n{note}")
    sys.stdout.flush()


def progress(text: str) -> None:
    """Print a line about the progress to stderr."""
    print(f"[benchmark] {text}", file=sys.stderr, flush=True)


def size_name(size_bytes: int) -> str:
    """Return a size as text, such as 64 KiB."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def gib_and_us(sample: Sample, block_bytes: int) -> str:
    """Return the throughput and the median time of one call, as text."""
    return f"{sample.items_per_s * block_bytes / GIB:.2f} GiB/s, {1e6 * sample.p50_s:.0f} us"
