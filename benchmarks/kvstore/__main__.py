"""The pool's benchmarks: one markdown table per section, with our pool, the peer, and the machine's limit.

  python -m benchmarks.kvstore [--quick] [--full] [--only SECTION] [--directory DIR]

The sides are measured in turn.

Owns: the sections and their tables. Does not know: how anything is measured.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.kvstore import mooncake_store
from benchmarks.kvstore.disk import (
    FIO_HINT,
    FIO_NOTE,
    FIO_PAGES,
    Disk,
    DiskOp,
    FioEngine,
    FioFile,
    SlabFile,
    has_fio,
)
from benchmarks.kvstore.index import IndexKeys, resident_bytes
from benchmarks.kvstore.limits import ROOT, DictKeys, Memcpy, RawStream, SeqpacketKeys
from benchmarks.kvstore.ours import LAYOUTS, OurStore
from benchmarks.kvstore.rounds import (
    GIB,
    Side,
    Timed,
    gib_and_us,
    in_rounds,
    print_table,
    progress,
    size_name,
    time_sides,
)
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Lookups, Memory, Op, Workload

DEPTHS = (1, 4)
OPS: tuple[Op, ...] = ("put", "get")
DISK_SIZES = (256 << 10, 1 << 20, 4 << 20)
DISK_DEPTHS = (1, 4, 8)
DISK_OPS: tuple[DiskOp, ...] = ("write", "read")
SMALLEST = min(LAYOUTS)
BATCH = 1000
OFFSETS = (0, 16, 63)
OURS, PEER, PEER_CHECKED = "ours", "Mooncake Store", "Mooncake Store, checksums on"


class Effort(NamedTuple):
    """The extent of the measurements: rounds, seconds and sizes."""

    num_rounds: int
    budget_s: float
    """The seconds that one side is measured in one round."""
    num_disk_rounds: int
    disk_budget_s: float
    disk_bytes: int
    num_index_blocks: tuple[int, ...]


QUICK = Effort(3, 0.05, 1, 0.15, 256 << 20, (1_000_000,))
NORMAL = Effort(5, 0.2, 3, 0.5, 1 << 30, (1_000_000,))
FULL = NORMAL._replace(num_index_blocks=(1_000_000, 10_000_000))


def metadata(effort: Effort, python: Path | None) -> None:
    """Measure how many keys a second are found. `python` runs the peer; None: without the peer."""
    num_blocks = WORKING_SET_BYTES // SMALLEST
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(OurStore("unix")))
        stores: dict[str, Side] = {"ours, through the socket": Workload(store, Memory())}
        if python is not None:
            stores[PEER] = stack.enter_context(mooncake_store.same_process(python, {}))[1]
        for name, side in stores.items():
            progress(f"metadata: filling {name}")
            side.open(SMALLEST)
        seqpacket = stack.enter_context(contextlib.closing(SeqpacketKeys()))
        sides: dict[str, Timed] = {
            "ours, in process": Lookups(IndexKeys(num_blocks), num_blocks),
            **stores,
            "limit: a dict in process": Lookups(DictKeys(num_blocks), num_blocks),
            "limit: SOCK_SEQPACKET round trip": Lookups(seqpacket, num_blocks),
        }
        progress("metadata: measuring")
        one = time_sides(sides, "exists", 1, effort.budget_s, effort.num_rounds)
        many = time_sides(sides, "exists", BATCH, effort.budget_s, effort.num_rounds)
    print_table(
        f"Metadata: exists, {num_blocks:,} blocks",
        ("", f"keys/s, {BATCH} keys a call", "p50, one key", "p99, one key"),
        [
            (
                name,
                f"{many[name].items_per_s:,.0f}",
                f"{1e6 * one[name].p50_s:.1f} us",
                f"{1e6 * one[name].p99_s:.1f} us",
            )
            for name in sides
        ],
    )


def memory(effort: Effort, python: Path | None) -> None:
    """Measure put and get through shared memory. `python` runs the peer; None: without the peer."""
    with contextlib.ExitStack() as stack:
        store, blocks = stack.enter_context(contextlib.closing(OurStore("unix"))), Memory()
        sides: dict[str, Side] = {OURS: Workload(store, blocks)}
        if python is not None:
            sides[PEER] = stack.enter_context(mooncake_store.same_process(python, {}))[1]
            sides[PEER_CHECKED] = stack.enter_context(
                mooncake_store.same_process(python, mooncake_store.CHECKSUMS)
            )[1]
        sides["limit: memcpy"] = Workload(Memcpy(), blocks)
        _put_and_get("Memory: one host", effort, sides, has_leases=True)


def buffers(effort: Effort) -> None:
    """Measure gets through shared memory into buffers at different offsets in a cache line.

    Buffers of numpy begin at offset 16.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        sides = {
            f"at {offset}": Workload(
                stack.enter_context(contextlib.closing(OurStore("unix"))), Memory(offset=offset)
            )
            for offset in OFFSETS
        }
        for block_bytes in LAYOUTS:
            progress(f"buffers: {size_name(block_bytes)}")
            for side in sides.values():
                side.open(block_bytes)
            figures = time_sides(sides, "get", 1, effort.budget_s, effort.num_rounds)
            cells = [gib_and_us(figures[name], block_bytes) for name in sides]
            rows.append((f"get 1 x {size_name(block_bytes)}", *cells))
    print_table("Buffers: bytes behind the start of a line of the cache", ("block", *sides), rows)


def tcp(effort: Effort, python: Path | None) -> None:
    """Measure put and get over TCP on loopback from a second process.

    `python` runs the peer; None: without the peer.
    """
    with contextlib.ExitStack() as stack:
        store, stream = (
            stack.enter_context(contextlib.closing(store)) for store in (OurStore("tcp"), RawStream("tcp"))
        )
        blocks = Memory()
        sides: dict[str, Side] = {OURS: Workload(store, blocks)}
        if python is not None:
            sides[PEER] = stack.enter_context(mooncake_store.second_process(python, {}))
            sides[PEER_CHECKED] = stack.enter_context(
                mooncake_store.second_process(python, mooncake_store.CHECKSUMS)
            )
        sides["limit: one raw stream"] = Workload(stream, blocks)
        _put_and_get("TCP: loopback, second process", effort, sides, has_leases=False)


def _put_and_get(title: str, effort: Effort, sides: Mapping[str, Side], *, has_leases: bool) -> None:
    """Measure all sides, and print one row for each operation, size and depth.

    The last side is the limit. `has_leases`: whether our leases are measured, too.
    """
    limit = list(sides)[-1]
    layers = ", ".join(str(layout.num_layers) for layout in LAYOUTS.values())
    rows = []
    lease_rows = []
    for block_bytes in LAYOUTS:
        progress(f"{title}: {size_name(block_bytes)}")
        for side in sides.values():
            side.open(block_bytes)
        for depth, op in itertools.product(DEPTHS, OPS):
            figures = time_sides(sides, op, depth, effort.budget_s, effort.num_rounds)
            rate = figures[OURS].items_per_s
            by_peer = f"{rate / figures[PEER].items_per_s:.2f}" if PEER in figures else "-"
            cells = [gib_and_us(figures[name], block_bytes) for name in sides]
            by_limit = f"{rate / figures[limit].items_per_s:.0%}"
            rows.append((f"{op} {depth} x {size_name(block_bytes)}", *cells, by_peer, by_limit))
        if has_leases:
            leases = [
                time_sides({OURS: sides[OURS]}, "lease", depth, effort.budget_s, effort.num_rounds)[OURS]
                for depth in DEPTHS
            ]
            lease_rows.append((size_name(block_bytes), *(f"{1e6 * lease.p50_s:.0f} us" for lease in leases)))
    print_table(
        title,
        ("blocks a call", *sides, "ours by the peer", "ours of the limit"),
        rows,
        f"Throughput and p50 of one call. Every side takes {size_name(WORKING_SET_BYTES)} of blocks in turn."
        f" Ours always writes and verifies checksums, one for each layer ({layers} layers a block, by size).",
    )
    if lease_rows:
        columns = ("block", *(f"{depth} a call" for depth in DEPTHS))
        print_table("Memory: lease and give back, no copy (ours, p50)", columns, lease_rows)


def ssd(effort: Effort, directory: Path) -> None:
    """Measure random reads and writes of slots in our slab file.

    The limit is fio, if installed, with the same reads and writes.
    """
    rows = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
        fio = FioFile(Path(folder), effort.disk_bytes) if has_fio() else None
        for block_bytes in DISK_SIZES:
            with (
                tempfile.TemporaryDirectory(dir=folder) as slab_folder,
                contextlib.closing(SlabFile(Path(slab_folder), effort.disk_bytes, block_bytes)) as slab,
            ):
                engines = fio.engines(block_bytes) if fio else {}
                for depth, op in itertools.product(DISK_DEPTHS, DISK_OPS):
                    name = f"{op} {size_name(block_bytes)}, depth {depth}"
                    progress(f"ssd: {name}")
                    rows.append((name, *_disk_cells(effort, slab, engines, block_bytes, op, depth)))
    print_table(
        f"SSD: random slots of {effort.disk_bytes / GIB:g} GiB, O_DIRECT",
        (
            "",
            "ours: slab, threads",
            *(f"limit: fio, {pages} pages" for pages in FIO_PAGES),
            "ours of the limit",
        ),
        rows,
        FIO_NOTE if fio else FIO_HINT,
    )


def _disk_cells(
    effort: Effort, slab: Disk, engines: Mapping[str, FioEngine], block_bytes: int, op: DiskOp, depth: int
) -> list[str]:
    """Return the cells of a row: our figure, fio's, and our figure as a share of the best of fio's.

    fio has a cell for each kind of memory, with its fastest engine.
    """
    sides: dict[str, Disk] = {OURS: slab, **engines}
    figures = in_rounds(
        sides, lambda side: side.sample(op, depth, effort.disk_budget_s), effort.num_disk_rounds
    )
    ours = figures.pop(OURS)
    if not figures:
        return [gib_and_us(ours, block_bytes), *("-" for _ in FIO_PAGES), "-"]
    cells = [gib_and_us(ours, block_bytes)]
    for pages in FIO_PAGES:
        of_kind = {engine.name: figures[name] for name, engine in engines.items() if engine.pages == pages}
        best = max(of_kind, key=lambda name: of_kind[name].items_per_s)
        cells.append(f"{gib_and_us(of_kind[best], block_bytes)} ({best})")
    limit = max(figure.items_per_s for figure in figures.values())
    return [*cells, f"{ours.items_per_s / limit:.0%}"]


def index_bytes(effort: Effort, python: Path | None) -> None:
    """Measure the bytes of memory that the index takes for each block.

    `python` runs the peer; None: without the peer.
    """
    rows = []
    for num_blocks in effort.num_index_blocks:
        progress(f"bytes: {num_blocks:,} blocks")
        command = [sys.executable, "-m", "benchmarks.kvstore.index", str(num_blocks)]
        figures = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        rows.append(
            (
                f"ours, {num_blocks:,} blocks",
                f"{figures['process_bytes']:.0f}",
                f"{figures['segment_bytes']:.0f}",
                f"{figures['sealed_per_s']:,.0f}",
            )
        )
    if python is not None:
        num_blocks = effort.num_index_blocks[0]
        progress(f"bytes: {PEER}, {num_blocks:,} objects")
        with mooncake_store.same_process(python, {}) as (master, driver):
            driver.open(SMALLEST)
            before_bytes = resident_bytes(master.process.pid)
            elapsed_s = driver.call("put_many", num_blocks)
            num_bytes = (resident_bytes(master.process.pid) - before_bytes) / num_blocks
        rows.append(
            (
                f"{PEER}'s master, {num_blocks:,} objects",
                f"{num_bytes:.0f}",
                "-",
                f"{num_blocks / elapsed_s:,.0f}",
            )
        )
    print_table(
        "Bytes per block of the index",
        ("", "in the process", "in the segment", "sealed per second"),
        rows,
        "Ours: in process, 8 layers. The peer: through its client, objects of one byte. Batches of 1000.",
    )


SECTIONS = ("metadata", "memory", "buffers", "tcp", "ssd", "bytes")


def main() -> None:
    """Print the tables of the sections that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvstore", description=__doc__.splitlines()[0])
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    amount.add_argument("--full", action="store_true", help="also an index of 10M blocks (several GiB)")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--directory", type=Path, default=mooncake_store.CACHE, help="of the disk to measure")
    flags = parser.parse_args()
    effort = FULL if flags.full else QUICK if flags.quick else NORMAL
    wanted = [flags.only] if flags.only else SECTIONS
    python = None
    if wanted not in (["ssd"], ["buffers"]):
        try:
            python = mooncake_store.install()
        except mooncake_store.PeerError as error:
            progress(f"no peer: {error}")
    for section in wanted:
        match section:
            case "metadata":
                metadata(effort, python)
            case "memory":
                memory(effort, python)
            case "buffers":
                buffers(effort)
            case "tcp":
                tcp(effort, python)
            case "ssd":
                flags.directory.mkdir(parents=True, exist_ok=True)
                ssd(effort, flags.directory)
            case "bytes":
                index_bytes(effort, python)


if __name__ == "__main__":
    main()
