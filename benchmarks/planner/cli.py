"""`mooncake-plan`: which cluster to build for a workload.

Owns: the command line. Does not know: how anything is searched.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.planner import workload as workloads
from benchmarks.planner.advice import advice
from benchmarks.planner.goodput import Goodputs
from benchmarks.planner.placements import group_sizes, label
from benchmarks.planner.questions import questions
from benchmarks.planner.report import Report, print_report
from benchmarks.planner.search import Plan, Search
from benchmarks.planner.workload import Workload
from benchmarks.simulator.cards import HARDWARE, MODELS
from benchmarks.simulator.setup import Setup
from benchmarks.traces.reading import TraceFile
from benchmarks.traces.replay import jittered
from benchmarks.traces.request import BLOCK_TOKENS
from benchmarks.traces.synthetic import SyntheticLoad
from mooncake.errors import ConfigError, MooncakeError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
TICK_S = 3.0
"""of the clock of Mooncake's published traces"""


def main() -> None:
    """Entry point of the `mooncake-plan` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0, 1 if something failed, 2 for wrong use, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        _plan(options, shlex.join(["mooncake-plan", *arguments]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MooncakeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError) else FAILED
    return 0


def _plan(options: argparse.Namespace, command: str) -> None:
    began_s = time.monotonic()
    base = _base(options)
    workload = _workload(options)
    sizes = group_sizes(base, options.devices, workload.longest_tokens)
    plan = _search(base, workload, options.devices, sizes, options)
    setup = (plan.disaggregated or plan.coupled).setup
    report = Report(
        command,
        msgspec.to_builtins(base),
        options.attainment,
        plan,
        questions(setup, workload, plan.coupled.goodput_per_s, options.rate),
        advice(plan, options.rate),
        time.monotonic() - began_s,
    )
    print_report(report, Console())
    if options.out is not None:
        report.save(options.out)


def _search(
    base: Setup, workload: Workload, num_devices: int, sizes: Sequence[int], options: argparse.Namespace
) -> Plan:
    """With a bar of the simulations, how many of which there will be nobody knows."""
    columns = (
        TextColumn("{task.completed} simulations"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(setup: Setup, rate_per_s: float) -> None:
            progress.update(task, advance=1, description=f"{label(setup)}, {rate_per_s:.3g} req/s")

        goodputs = Goodputs(
            lambda rate_per_s: workload.at(rate_per_s, base.slos, options.num_requests),
            options.attainment,
            show,
        )
        return Search(goodputs, base, num_devices, sizes, workload.mean_input_tokens).run()


def _base(options: argparse.Namespace) -> Setup:
    if options.profile is not None and options.gpus is None:
        raise ConfigError("a --profile is of one kind of instance: say with --gpus of how many devices")
    given = {"nic_gbps": options.nic_gbps, "pool_tokens": options.pool_tokens}
    return Setup(
        model=options.model,
        hardware=options.hardware,
        num_gpus=options.gpus,
        profile=options.profile,
        ttft_slo_s=options.ttft_slo,
        tbt_slo_s=options.tbt_slo,
        rejects=False,
        **{name: value for name, value in given.items() if value is not None},
    )


def _workload(options: argparse.Namespace) -> Workload:
    """Raises TraceError."""
    if options.trace is not None:
        trace = TraceFile(options.trace)
        requests = list(islice(jittered(trace, options.jitter, options.seed), options.num_requests))
        if trace.repairs:
            print(f"{options.trace}: {trace.repairs}", file=sys.stderr)
        return workloads.of_trace(requests)
    if options.synthetic is not None:
        load = SyntheticLoad.load(options.synthetic)
    else:
        num_input, num_output = options.lengths
        shared_tokens = int(options.shared_prefix * num_input) // BLOCK_TOKENS * BLOCK_TOKENS
        load = SyntheticLoad(1.0, (num_input,), (num_output,), shared_prefix_tokens=shared_tokens)
    return workloads.of_synthetic(load, options.seed, options.num_requests)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake-plan",
        description="Say which cluster serves most of a workload within its SLOs, by simulating those that"
        " could be built.",
        epilog="docs/planner.md has the method. What is simulated: docs/simulator.md.",
    )
    _add_workload(parser.add_argument_group("workload"))
    _add_hardware(parser.add_argument_group("devices"))
    _add_slos(parser.add_argument_group("SLOs"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="the plan as JSON")
    return parser


def _add_workload(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace: .jsonl or .csv, or either .gz")
    synthetic_help = "a synthetic load, as mooncake-bench fit writes it"
    source.add_argument("--synthetic", type=Path, metavar="FILE", help=synthetic_help)
    source.add_argument("--lengths", type=_lengths, metavar="IN/OUT", help="tokens of every request")
    shared_help = "share of a prompt of --lengths that all have in common, in whole blocks of 512 tokens"
    group.add_argument("--shared-prefix", type=_share, default=0.0, metavar="SHARE", help=shared_help)
    rate_help = "requests/s that the cluster is to serve; the advice says whether it does"
    group.add_argument("--rate", type=_positive, help=rate_help)
    jitter_help = "requests of one tick of a trace's clock arrive spread over so long (default: %(default)s)"
    group.add_argument("--jitter", type=_not_negative, default=TICK_S, metavar="SECONDS", help=jitter_help)
    requests_help = "no simulation has more requests (default: %(default)s)"
    group.add_argument("--num-requests", type=_count, default=2000, help=requests_help)
    group.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")


def _add_hardware(group: argparse._ArgumentGroup) -> None:
    default = Setup()
    group.add_argument("--devices", type=_count, required=True, help="how many there are, in whole nodes")
    model_help = f"{', '.join(MODELS)} (default: %(default)s)"
    group.add_argument("--model", default=default.model, help=model_help)
    hardware_help = f"{', '.join(HARDWARE)} (default: %(default)s)"
    group.add_argument("--hardware", default=default.hardware, help=hardware_help)
    group.add_argument("--gpus", type=_count, help="of an instance (default: the best number)")
    group.add_argument("--profile", metavar="FILE", help="costs of a real worker instead of the cards'")
    group.add_argument("--nic-gbps", type=_positive, help="of an instance (default: the hardware's)")
    pool_help = "of an instance's part of the pool (default: its DRAM)"
    group.add_argument("--pool-tokens", type=_count, help=pool_help)


def _add_slos(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ttft-slo", type=_positive, required=True, metavar="SECONDS")
    group.add_argument("--tbt-slo", type=_positive, required=True, metavar="SECONDS")
    attainment_help = "share of the requests that must be within both (default: %(default)s)"
    group.add_argument("--attainment", type=_share, default=0.9, metavar="SHARE", help=attainment_help)


def _lengths(text: str) -> tuple[float, float]:
    num_input, num_output = map(_count, text.split("/"))
    return float(num_input), float(num_output)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
