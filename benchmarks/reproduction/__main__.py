"""The program of `make reproduce`: it runs the experiments and writes docs/reproduction.md.

    .venv/bin/python -m benchmarks.reproduction TRACE.jsonl.gz [--only scheduling,overload]

The page is always made by one run of all experiments. With `--only` the findings are printed instead. The
exit code is 1 if an experiment has failed. All other experiments are run nevertheless, and the page names the
failed ones.
"""

import argparse
import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.reproduction.experiment import Experiment, Trace
from benchmarks.reproduction.experiments.cache import formulas, hit_rate, pipeline, pools, workload
from benchmarks.reproduction.experiments.disaggregation import (
    coupled,
    datasets,
    elasticity,
    inlining,
    interconnects,
    interference,
    planner,
)
from benchmarks.reproduction.experiments.placement import (
    banaserve,
    modules,
    overload,
    prefill_groups,
    scheduling,
)
from benchmarks.reproduction.page import Found, Run, section, write_page
from benchmarks.tools.arguments import count
from mooncake.cli.command_line import FAILED, WRONG_USE

EXPERIMENTS = (
    workload.EXPERIMENT,
    hit_rate.EXPERIMENT,
    scheduling.POLICIES,
    scheduling.REPLICAS,
    banaserve.EXPERIMENT,
    modules.EXPERIMENT,
    coupled.REAL_WORKLOAD,
    coupled.CAPACITY,
    datasets.EXPERIMENT,
    interference.EXPERIMENT,
    inlining.EXPERIMENT,
    overload.EXPERIMENT,
    elasticity.EXPERIMENT,
    pools.GLOBAL_POOL,
    pools.BANDWIDTH,
    pools.RATIO,
    planner.EXPERIMENT,
    formulas.SHAPES,
    formulas.REUSE,
    formulas.OCCUPANCY,
    pipeline.EXPERIMENT,
    interconnects.EXPERIMENT,
    prefill_groups.EXPERIMENT,
)


def main() -> None:
    options = _parser().parse_args()
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    names = options.only.split(",") if options.only else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        known = ", ".join(by_name)
        print(f"error: no experiment is named {', '.join(unknown)}; there are {known}", file=sys.stderr)
        sys.exit(WRONG_USE)
    options.results.mkdir(parents=True, exist_ok=True)
    began_s, date = time.monotonic(), datetime.now(UTC).date().isoformat()
    chosen = [by_name[name] for name in names]
    found = run_all(chosen, Trace(options.trace), options.results, options.processes)
    if options.only:
        print("\n".join(section(by_name[name], of_one) for name, of_one in found.items()))
    else:
        seconds = time.monotonic() - began_s
        run = Run(options.trace.name, date, _machine(), options.processes, seconds)
        write_page(EXPERIMENTS, found, run, options.results, options.page)
    sys.exit(0 if len(found) == len(chosen) else FAILED)


def run_all(chosen: Sequence[Experiment], trace: Trace, folder: Path, num_processes: int) -> dict[str, Found]:
    """Run the experiments, longest first, and return their findings by name.

    An experiment that fails is reported on stderr and left out. Pictures are written to `folder`.
    """
    found: dict[str, Found] = {}
    longest_first = sorted(chosen, key=lambda experiment: -experiment.cost)
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(num_processes, initializer=_collect_rarely) as pool,
    ):
        task = progress.add_task("experiments", total=len(chosen))
        futures = {pool.submit(run_one, e.name, trace, folder): e.name for e in longest_first}
        for future in as_completed(futures):
            name, error = futures[future], future.exception()
            if error is None:
                found[name] = future.result()
                progress.console.print(f"{name}: {found[name].seconds:.0f} s")
            else:
                told = "".join(traceback.format_exception(error))
                progress.console.print(f"{name} failed: {told}", markup=False, highlight=False)
            progress.advance(task)
    return found


def _collect_rarely() -> None:
    """Collect garbage less often. By default this takes a sixth of the time of a simulation."""
    gc.set_threshold(1_000_000, 20, 100)


def run_one(name: str, trace: Trace, folder: Path) -> Found:
    """Run one experiment in this process."""
    experiment = next(e for e in EXPERIMENTS if e.name == name)
    began_s = time.monotonic()
    outcome = experiment.run(trace, folder)
    return Found(outcome, time.monotonic() - began_s)


def _machine() -> str:
    """Return a description of the machine for the page."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduction", description="Published results beside ours."
    )
    parser.add_argument("trace", type=Path, help="Mooncake's conversation_trace.jsonl, or .gz")
    only_help = "run these experiments, with commas, and print what they find; no page is written"
    parser.add_argument("--only", metavar="NAMES", help=only_help)
    pictures = Path("build/reproduction")
    parser.add_argument("--results", type=Path, default=pictures, metavar="FOLDER", help="for pictures")
    parser.add_argument("--page", type=Path, default=Path("docs/reproduction.md"), metavar="FILE")
    processes_help = "experiments at the same time (default: %(default)s)"
    parser.add_argument("--processes", type=count, default=2, help=processes_help)
    return parser


if __name__ == "__main__":
    main()
