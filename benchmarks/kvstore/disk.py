"""Random writes and reads of one preallocated file that was written once: our slab, and fio as the limit.

Owns: both measurements. Does not know: the pool above the slab.
"""

import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.kvstore.ours import FINGERPRINT, LAYOUTS
from benchmarks.kvstore.rounds import Sample
from kvstore.ssd.slab import Slab
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile
from mooncake.node.segments import create_segment

DiskOp = Literal["write", "read"]
Pages = Literal["4 KiB", "huge"]

FIO_HINT = "fio is not installed (apt install fio, dnf install fio, brew install fio): no limit for the disk."
FIO_NOTE = (
    "fio: the fastest of its engines, its memory in pages of that size; ours: a segment that has settled."
)
MOST_REQUESTS = 8
FIO_ENGINES = ("libaio", "io_uring", "psync")
FIO_PAGES: tuple[Pages, ...] = ("4 KiB", "huge")


class Disk(Protocol):
    """A way to write and read blocks of one size."""

    def sample(self, op: DiskOp, depth: int, budget_s: float) -> Sample:
        """Measure with `depth` requests in flight. The items of the sample are blocks."""


class SlabFile:
    """One slab with slots of one size. `depth` threads use it at the same time."""

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        self._slab = Slab.open(directory, "benchmark", size_bytes, FINGERPRINT, LAYOUTS[block_bytes])
        self._memory = _settled_memory(MOST_REQUESTS * self._slab.slot_bytes)
        for slot in range(self._slab.num_slots):
            self._slab.write(slot, self._buffer(0))

    def sample(self, op: DiskOp, depth: int, budget_s: float) -> Sample:
        """Measure with `depth` threads, each with one request in flight."""
        call = self._slab.write if op == "write" else self._slab.read
        start = threading.Barrier(depth + 1)

        def work(seed: int) -> list[float]:
            rng, buffer, times_s = random.Random(seed), self._buffer(seed), list[float]()
            start.wait()
            deadline_s = time.perf_counter() + budget_s
            while not times_s or time.perf_counter() < deadline_s:
                started_s = time.perf_counter()
                call(rng.randrange(self._slab.num_slots), buffer)
                times_s.append(time.perf_counter() - started_s)
            return times_s

        with ThreadPoolExecutor(depth) as threads:
            running = [threads.submit(work, seed) for seed in range(depth)]
            start.wait()
            started_s = time.perf_counter()
            times_s = [seconds for future in running for seconds in future.result()]
            elapsed_s = time.perf_counter() - started_s
        return Sample.of(times_s, 1)._replace(items_per_s=len(times_s) / elapsed_s)

    def _buffer(self, index: int) -> memoryview:
        return self._memory[index * self._slab.slot_bytes : (index + 1) * self._slab.slot_bytes]

    def close(self) -> None:
        self._slab.close()


class FioFile:
    """A file for fio, first preallocated and then written once."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._path = directory / "fio"
        with open(self._path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        self.run("--rw=write", "--bs=4M", "--ioengine=psync", environment={})
        self._engines = [name for name in FIO_ENGINES if self._works(name)]

    def engines(self, block_bytes: int) -> dict[str, "FioEngine"]:
        """Return the engines that work on this machine, each with both kinds of memory."""
        return {
            f"{name}, {pages} pages": FioEngine(self, name, pages, block_bytes)
            for name in self._engines
            for pages in FIO_PAGES
        }

    def run(self, *options: str, environment: Mapping[str, str]) -> dict[str, Any]:
        """Run one job, and return fio's report. `environment` is added to this process's own."""
        command = ["fio", "--name=limit", f"--filename={self._path}", f"--size={self._size_bytes}"]
        command += ["--direct=1", "--fallocate=none", "--output-format=json", *options]
        variables = {**os.environ, **environment}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        return job

    def _works(self, name: str) -> bool:
        try:
            FioEngine(self, name, "4 KiB", 1 << 20).sample("read", 1, 0.05)
        except subprocess.CalledProcessError:
            return False
        return True


class FioEngine:
    """An engine of fio, with one kind of memory.

    psync has one thread for each request in flight, other engines have one thread. The memory has 4 KiB pages
    or huge pages. A disk may be much faster with huge pages, as a request has fewer pieces.
    """

    def __init__(self, file: FioFile, name: str, pages: Pages, block_bytes: int) -> None:
        self.name = name
        self.pages = pages
        self._file = file
        self._block_bytes = block_bytes

    def sample(self, op: DiskOp, depth: int, budget_s: float) -> Sample:
        """Measure with `depth` requests in flight. The items of the sample are blocks."""
        is_sync, is_huge = self.name == "psync", self.pages == "huge"
        job = self._file.run(
            f"--rw=rand{op}",
            f"--bs={self._block_bytes}",
            f"--ioengine={self.name}",
            *([f"--numjobs={depth}", "--thread"] if is_sync else [f"--iodepth={depth}"]),
            "--time_based",
            f"--runtime={round(1000 * budget_s)}ms",
            "--group_reporting",
            *(["--iomem_align=2m"] if is_huge else []),
            environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if is_huge else {},
        )[op]
        latency_ns = job["clat_ns"]["percentile"]
        return Sample(
            job["bw_bytes"] / self._block_bytes,
            latency_ns["50.000000"] / 1e9,
            latency_ns["99.000000"] / 1e9,
        )


def has_fio() -> bool:
    return shutil.which("fio") is not None


def _settled_memory(num_bytes: int) -> memoryview:
    """Return shared memory like that of a settled segment, filled with incompressible bytes."""
    num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    descriptor = create_segment("benchmark", num_bytes)
    memory = MappedFile(descriptor, num_bytes)
    os.close(descriptor)
    memory.view[:] = os.urandom(num_bytes)
    memory.use_huge_pages(0, num_bytes)
    return memory.view
