"""`make reproduce`: runs the experiments and writes docs/reproduction.md.

    .venv/bin/python -m benchmarks.reproduction TRACE.jsonl.gz [--only scheduling,overload]

What has been found is kept (`--results`), so that single experiments can be run again.
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from benchmarks.reproduction import (
    banaserve,
    coupled,
    datasets,
    formulas,
    hit_rate,
    overload,
    planner,
    pools,
    scheduling,
)
from benchmarks.reproduction.experiment import Experiment, Outcome, Trace
from benchmarks.reproduction.page import Found, write_page

EXPERIMENTS = (
    hit_rate.EXPERIMENT,
    scheduling.POLICIES,
    scheduling.REPLICAS,
    banaserve.EXPERIMENT,
    coupled.REAL_WORKLOAD,
    coupled.CAPACITY,
    datasets.EXPERIMENT,
    overload.EXPERIMENT,
    pools.GLOBAL_POOL,
    pools.BANDWIDTH,
    pools.RATIO,
    planner.EXPERIMENT,
    formulas.SHAPES,
    formulas.REUSE,
    formulas.OCCUPANCY,
)


def main() -> None:
    options = _parser().parse_args()
    named = set(options.only.split(",")) if options.only else {e.name for e in EXPERIMENTS}
    if unknown := named - {e.name for e in EXPERIMENTS}:
        known = ", ".join(e.name for e in EXPERIMENTS)
        sys.exit(f"error: no experiment is named {', '.join(sorted(unknown))}; there are {known}")
    options.results.mkdir(parents=True, exist_ok=True)
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in named]
    run_all(chosen, Trace(options.trace), options.results, options.processes)
    write_page([(e, load(e, options.results)) for e in EXPERIMENTS], options.results, options.page)


def run_all(chosen: Sequence[Experiment], trace: Trace, results: Path, num_processes: int) -> None:
    """Each is kept as soon as it is done."""
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(num_processes) as pool:
        task = progress.add_task("experiments", total=len(chosen))
        futures = {pool.submit(run_one, e.name, trace.path, results): e for e in chosen}
        for future in as_completed(futures):
            seconds = future.result()
            progress.console.print(f"{futures[future].name}: {seconds:.0f} s")
            progress.advance(task)


def run_one(name: str, trace: Path, results: Path) -> float:
    """Seconds that it took."""
    experiment = next(e for e in EXPERIMENTS if e.name == name)
    began_s = time.monotonic()
    outcome: Outcome = experiment.run(Trace(trace), results)
    seconds = time.monotonic() - began_s
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    found = Found(outcome, datetime.now(UTC).date().isoformat(), machine)
    (results / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return seconds


def load(experiment: Experiment, results: Path) -> Found | None:
    """What was found, if it ever ran."""
    path = results / f"{experiment.name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Found) if path.exists() else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.reproduction", description="Published results beside ours."
    )
    parser.add_argument("trace", type=Path, help="Mooncake's conversation_trace.jsonl, or .gz")
    parser.add_argument("--only", metavar="NAMES", help="experiments to run, with commas; default: all")
    parser.add_argument("--results", type=Path, default=Path("build/reproduction"), metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=Path("docs/reproduction.md"), metavar="FILE")
    parser.add_argument("--processes", type=int, default=2, help="experiments at the same time (default: 2)")
    return parser


if __name__ == "__main__":
    main()
