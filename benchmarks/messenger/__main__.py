"""The messenger's benchmarks: one markdown table per section, with our transfers, the peer's, and limits.

  python -m benchmarks.messenger [--quick] [--only SECTION] [--kib SIZE...] [--without-peer]

The limits are those of the machine. The sides are measured in turn.

Owns: the sections, their tables and bars. Does not know: how anything is measured.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.kvstore.limits import Memcpy, RawStream
from benchmarks.kvstore.mooncake_store import PACKAGE, PeerError, install
from benchmarks.kvstore.rounds import (
    GIB,
    Sample,
    Side,
    each_round,
    gib_and_us,
    in_rounds,
    medians,
    print_table,
    progress,
    share,
    size_name,
)
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Memory, Op, Workload
from benchmarks.messenger.limits import MESSAGE_BYTES, StreamingBlocks, TwoStreams, time_round_trips
from benchmarks.messenger.ours import ENGINES
from benchmarks.messenger.peer import transfer_engine
from benchmarks.messenger.work import BULK_BYTES, CONCURRENT_BYTES, LATENCY_BYTES, NUM_BULK, Transfers

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 8)
OPS: dict[Op, str] = {"put": "write", "get": "read"}
NUM_CONCURRENT = 64
PEER = "Transfer Engine"
RAW, STREAMING, MEMCPY = "raw TCP", "raw TCP, streaming", "memcpy"
LARGE_BYTES = 1 << 20
"""The bytes of a block from which on there are limits (*bars*).

The limits are least shares of raw TCP, of memcpy and of the peer.
"""
SHARES = "Throughputs are medians over rounds, their shares medians of the shares within each round."


class Effort(NamedTuple):
    """The extent of the measurements."""

    num_rounds: int
    """The number of rounds in which sides are compared. Rounds are short, as the machine's speed varies."""
    budget_s: float
    """The seconds that one side is measured in one round."""
    num_long_rounds: int
    long_budget_s: float
    """The seconds of a measurement that takes long to become steady."""
    num_round_trips: int

    @property
    def num_pairs(self) -> int:
        """The number of rounds with two short measurements each.

        They take as long as `num_long_rounds` rounds with two long measurements each.
        """
        return round(self.num_long_rounds * self.long_budget_s / self.budget_s)


QUICK = Effort(6, 0.025, 3, 0.2, 2_000)
NORMAL = Effort(20, 0.05, 5, 1.0, 20_000)


class TransferSide(Side, Protocol):
    """The interface of a side that transfers between two processes.

    It is `Transfers`, in this process or in a driver.
    """

    def time_concurrent(self, op: Op, num_transfers: int, budget_s: float) -> list[float]: ...

    def time_latency(self, op: Op, num_bulk: int, budget_s: float) -> tuple[list[float], float]: ...


class Bar(NamedTuple):
    """A limit (*bar*) for a figure, and the figure: `value`."""

    name: str
    value: float
    bar: float
    is_least: bool = True
    """Whether `bar` is the least value that is allowed; otherwise it is the largest."""
    unit: str = ""

    def __str__(self) -> str:
        is_met = self.value >= self.bar if self.is_least else self.value <= self.bar
        sign = ">=" if self.is_least else "<="
        verdict = "met" if is_met else "MISSED"
        return f"{self.name} {self.value:.2f}{self.unit} {sign} {self.bar:g}{self.unit}: {verdict}"


def ours_name(transport: str) -> str:
    """Return our name in columns and rows, for one transport."""
    return f"ours, {transport}"


@contextlib.contextmanager
def engines(python: Path | None) -> Iterator[dict[str, TransferSide]]:
    """Make a context with our transfers over each transport of `ENGINES`, and with the peer's.

    `python` runs the peer's Transfer Engine; None: without the peer.
    """
    with contextlib.ExitStack() as stack:
        sides: dict[str, TransferSide] = {
            ours_name(transport): Transfers(stack.enter_context(start()))
            for transport, start in ENGINES.items()
        }
        if python is not None:
            sides[PEER] = stack.enter_context(transfer_engine(python))
        yield sides


def transfers(effort: Effort, python: Path | None, sizes: Sequence[int] = SIZES) -> None:
    """Measure every side and depth with blocks of these sizes, and print the table."""
    with contextlib.ExitStack() as stack:
        raw, unix, two = (
            stack.enter_context(contextlib.closing(limit))
            for limit in (RawStream("tcp"), RawStream("unix"), TwoStreams())
        )
        memory = Memory()
        sides: dict[str, Side] = {
            **stack.enter_context(engines(python)),
            RAW: Workload(raw, memory),
            STREAMING: stack.enter_context(contextlib.closing(StreamingBlocks(memory))),
            "two raw streams": Workload(two, memory),
            "Unix socket": Workload(unix, memory),
            MEMCPY: Workload(Memcpy(), memory),
        }
        rows = []
        for block_bytes in sizes:
            progress(f"transfers: {size_name(block_bytes)}")
            for side in sides.values():
                side.open(block_bytes)
            for depth, op in itertools.product(DEPTHS, OPS):
                samples = _time_sides(effort, sides, op, depth)
                figures = medians(samples)
                cells = [
                    _gib(figures[name].items_per_s * block_bytes)
                    if name == STREAMING
                    else gib_and_us(figures[name], block_bytes)
                    for name in sides
                ]
                bars = "; ".join(map(str, transfer_bars(samples, block_bytes, depth)))
                rows.append((f"{OPS[op]} {depth} x {size_name(block_bytes)}", *cells, bars or "-"))
    print_table(
        "Transfers between two processes",
        ("blocks under way", *sides, "bars"),
        rows,
        f"Throughput and p50 of one call. Every side takes {size_name(WORKING_SET_BYTES)} of blocks in turn."
        " Transfer Engine and raw sockets without checksums, over loopback. Raw TCP: one stream, a call is"
        " one request, a write is acknowledged; streaming: a request for each block, no acknowledgements.",
        SHARES,
    )


def _time_sides(effort: Effort, sides: Mapping[str, Side], op: Op, depth: int) -> dict[str, list[Sample]]:
    """Return the samples of one row. The items of the samples are blocks."""
    return each_round(
        sides, lambda side: Sample.of(side.time(op, depth, effort.budget_s), depth), effort.num_rounds
    )


def transfer_bars(samples: Mapping[str, Sequence[Sample]], block_bytes: int, depth: int) -> Iterator[Bar]:
    """Yield the limits (*bars*) for the figures of one row. Some sizes and depths have none."""
    tcp, shm = ours_name("tcp"), ours_name("shm")
    figures = medians(samples)
    if block_bytes >= LARGE_BYTES:
        yield Bar("tcp of raw TCP", share(samples, tcp, RAW), 0.85)
        if PEER in samples:
            yield Bar("tcp by Transfer Engine", share(samples, tcp, PEER), 1.3)
        yield Bar("shm of memcpy", share(samples, shm, MEMCPY), 0.8)
    elif block_bytes == 64 << 10 and depth == 1 and PEER in samples:
        yield Bar("tcp by Transfer Engine", share(samples, tcp, PEER), 1.0)
    elif block_bytes == 4 << 10 and depth == 1:
        yield Bar("tcp p50", 1e6 * figures[tcp].p50_s, 100, is_least=False, unit=" us")


def round_trips(effort: Effort) -> None:
    """Measure the least time that an answered request can take, and print the table."""
    rows = []
    for name, is_polling in (("both ends sleep", False), ("both ends poll", True)):
        sample = time_round_trips(is_polling=is_polling, num_rounds=effort.num_round_trips)
        rows.append((name, f"{1e6 * sample.p50_s:.1f} us", f"{1e6 * sample.p99_s:.1f} us"))
    print_table(f"Round trip of {MESSAGE_BYTES} bytes over TCP, loopback", ("", "p50", "p99"), rows)


def concurrent(effort: Effort, python: Path | None) -> None:
    """Measure many concurrent transfers, and one transfer of the same number of bytes."""
    with engines(python) as sides:
        rows = [_concurrent_row(effort, name, sides[name], op) for name in sides for op in OPS]
    size = size_name(CONCURRENT_BYTES // NUM_CONCURRENT)
    columns = ("", f"{NUM_CONCURRENT} x {size}", f"1 x {size_name(CONCURRENT_BYTES)}", "bar")
    print_table("Concurrent transfers", columns, rows, SHARES)


def _concurrent_row(effort: Effort, name: str, side: TransferSide, op: Op) -> list[str]:
    def measure(num_transfers: int) -> Sample:
        return Sample.of(side.time_concurrent(op, num_transfers, effort.budget_s), 1)

    progress(f"concurrent: {name}, {OPS[op]}")
    samples = each_round({"many": NUM_CONCURRENT, "one": 1}, measure, effort.num_pairs)
    of_one = Bar("of one", share(samples, "many", "one"), 0.9)
    rates = [_gib(figure.items_per_s * CONCURRENT_BYTES) for figure in medians(samples).values()]
    return [f"{name}, {OPS[op]}", *rates, _verdict(name, of_one)]


def latency(effort: Effort, python: Path | None) -> None:
    """Measure a latency transfer alone, and beside a bulk stream that fills the path."""
    with engines(python) as sides:
        rows = [_latency_row(effort, name, sides[name], op) for name in sides for op in OPS]
    print_table(
        f"A latency transfer of {size_name(LATENCY_BYTES)} beside bulk",
        ("", "p50 alone", "p50 beside", "p99 beside", "bulk beside", "bar"),
        rows,
        f"Bulk: {NUM_BULK} transfers of {size_name(BULK_BYTES)} under way in the same direction."
        f" {PEER} has no classes of transfers.",
    )


def _latency_row(effort: Effort, name: str, side: TransferSide, op: Op) -> list[str]:
    def measure(num_bulk: int) -> Sample:
        times_s, bulk_bytes_per_s = side.time_latency(op, num_bulk, effort.long_budget_s)
        return Sample.of(times_s, 1)._replace(items_per_s=bulk_bytes_per_s)

    progress(f"latency: {name}, {OPS[op]}")
    figures = in_rounds({"alone": 0, "beside": NUM_BULK}, measure, effort.num_long_rounds)
    alone, beside = figures["alone"], figures["beside"]
    times = [f"{1e6 * time_s:.0f} us" for time_s in (alone.p50_s, beside.p50_s, beside.p99_s)]
    slower = Bar("by alone", beside.p50_s / alone.p50_s, 3, is_least=False)
    return [f"{name}, {OPS[op]}", *times, _gib(beside.items_per_s), _verdict(name, slower)]


def _verdict(name: str, bar: Bar) -> str:
    """Return the text of a figure. Our figures are shown with their bars, the peer's without."""
    return f"{bar.name} {bar.value:.2f}" if name == PEER else str(bar)


def _gib(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIB:.2f} GiB/s"


SECTIONS = ("transfers", "round-trips", "concurrent", "latency")


def main() -> None:
    """Print the tables of the sections that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.messenger", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--kib", type=int, nargs="+", help="sizes of blocks in the first section")
    parser.add_argument("--without-peer", action="store_true", help="ours and the machine's limits only")
    flags = parser.parse_args()
    effort = QUICK if flags.quick else NORMAL
    wanted = [flags.only] if flags.only else SECTIONS
    python, peer_note = None, "not asked"
    if wanted != ["round-trips"] and not flags.without_peer:
        try:
            python, peer_note = install(), PACKAGE
        except PeerError as error:
            peer_note = f"none ({error})"
            progress(f"peer: {peer_note}")
    for section in wanted:
        match section:
            case "transfers":
                transfers(effort, python, [kib << 10 for kib in flags.kib] if flags.kib else SIZES)
            case "round-trips":
                round_trips(effort)
            case "concurrent":
                concurrent(effort, python)
            case "latency":
                latency(effort, python)
    print(f"\nPeer: {peer_note}")


if __name__ == "__main__":
    main()
