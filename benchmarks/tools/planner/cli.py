"""The command `mooncake-plan`, which says which cluster to build for a workload.

Owns: the command line. Does not know: how the search works.
"""

import argparse
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.tools.arguments import count, lengths, positive, share
from benchmarks.tools.planner import workload as workloads
from benchmarks.tools.planner.advice import advice
from benchmarks.tools.planner.goodput import Goodputs
from benchmarks.tools.planner.placements import group_sizes, label
from benchmarks.tools.planner.price import Price
from benchmarks.tools.planner.questions import questions
from benchmarks.tools.planner.report import Report, print_report
from benchmarks.tools.planner.search import Plan, Search
from benchmarks.tools.planner.workload import Workload
from benchmarks.tools.simulator.arguments import (
    add_instances,
    add_source,
    add_weights,
    setup_of,
    weights_of,
)
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import jittered
from benchmarks.tools.traces.request import BLOCK_TOKENS
from benchmarks.tools.traces.synthetic import SyntheticLoad
from conductor.performance.objective import Weights
from mooncake.cli.command_line import Parser, exit_code
from mooncake.cli.steps import StepDisplay
from mooncake.errors import ConfigError

EXAMPLES = """examples:
  mooncake-plan --devices 16 --device-price 2.5 --lengths 2048/128 --ttft-slo 1 --tbt-slo 0.1
  mooncake-plan --devices 64 --trace trace.jsonl --ttft-slo 30 --tbt-slo 0.1 --rate 20 --out plan.json
  mooncake-plan --devices 4 --lengths 2048/128 --ttft-slo 1 --tbt-slo 0.1 --weights 1 0.5 0.001

docs/planner.md has the method, docs/simulator.md what is simulated.
Exit codes: 0, 1 if something failed, 2 for wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    """Run the `mooncake-plan` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0, 1 after a failure, 2 for wrong use, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _plan(options, shlex.join(["mooncake-plan", *arguments])))


def _plan(options: argparse.Namespace, command: str) -> int:
    began_s = time.monotonic()
    base, weights = _base(options), weights_of(options)
    workload = _workload(options)
    sizes = group_sizes(base, options.devices, workload.longest_tokens)
    plan = _search(base, workload, sizes, weights, options)
    setup = (plan.disaggregated or plan.coupled).setup
    report = Report(
        command,
        msgspec.to_builtins(base),
        options.attainment,
        plan,
        questions(setup, workload, plan.coupled.goodput_per_s, options.rate),
        advice(plan, options.rate),
        None if options.device_price is None else Price(options.device_price, workload.mean_tokens),
        time.monotonic() - began_s,
    )
    print_report(report, Console())
    if options.out is not None:
        report.save(options.out)
    return 0


def _search(
    base: Setup,
    workload: Workload,
    sizes: Sequence[int],
    weights: Weights | None,
    options: argparse.Namespace,
) -> Plan:
    """Run the search, and show each simulation. Their number is not known in advance."""
    numbers = itertools.count(1)
    with StepDisplay() as steps:

        def show(setup: Setup, rate_per_s: float) -> None:
            what = f"{label(setup)}, {rate_per_s:.3g} req/s"
            steps.show(f"simulation {next(numbers)}", count=what)

        goodputs = Goodputs(
            lambda rate_per_s, nth: workload.at(rate_per_s, nth, base.slos, options.num_requests),
            options.attainment,
            show,
            options.seeds,
        )
        return Search(goodputs, base, options.devices, sizes, workload.sizes, weights).run()


def _base(options: argparse.Namespace) -> Setup:
    if options.profile is not None and options.num_gpus is None:
        raise ConfigError("a --profile is of one kind of instance: say with --gpus of how many devices")
    return setup_of(options, rejects=False)


def _workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options describe. Raises TraceError."""
    if options.trace is not None:
        trace = TraceFile(options.trace)
        by_seed = [
            list(itertools.islice(jittered(trace, options.jitter, options.seed + nth), options.num_requests))
            for nth in range(options.seeds)
        ]
        if trace.repairs:
            print(f"{options.trace}: {trace.repairs}", file=sys.stderr)
        return workloads.of_trace(by_seed)
    if options.synthetic is not None:
        load = SyntheticLoad.load(options.synthetic)
    else:
        num_input, num_output = options.lengths
        shared_tokens = int(options.shared_prefix * num_input) // BLOCK_TOKENS * BLOCK_TOKENS
        load = SyntheticLoad(
            1.0, (float(num_input),), (float(num_output),), shared_prefix_tokens=shared_tokens
        )
    return workloads.of_synthetic(load, options.seed, options.num_requests)


def _parser() -> Parser:
    parser = Parser(
        prog="mooncake-plan",
        description="Say which cluster serves most of a workload within its SLOs, by simulating those that"
        " could be built.",
        epilog=EXAMPLES,
    )
    parser.add_version()
    _add_workload(parser.add_argument_group("workload"))
    _add_hardware(parser.add_argument_group("devices"))
    _add_slos(parser.add_argument_group("SLOs"))
    objective = "compare clusters not by goodput but, at their goodputs, by"
    add_weights(parser.add_argument_group("objective"), objective)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the plan as JSON")
    return parser


def _add_workload(group: argparse._ArgumentGroup) -> None:
    source = add_source(group)
    source.add_argument("--lengths", type=lengths, metavar="IN/OUT", help="tokens of every request")
    shared_help = "share of a prompt of --lengths that all have in common, in whole blocks of 512 tokens"
    group.add_argument("--shared-prefix", type=share, default=0.0, metavar="SHARE", help=shared_help)
    rate_help = "requests/s that the cluster is to serve; the advice says whether it does"
    group.add_argument("--rate", type=positive, metavar="X", help=rate_help)
    seeds_help = "loads, drawn from --seed on, of which reported goodputs are (default: %(default)s)"
    group.add_argument("--seeds", type=count, default=3, metavar="N", help=seeds_help)
    requests_help = "no simulation has more requests (default: %(default)s)"
    group.add_argument("--num-requests", type=count, default=2000, metavar="N", help=requests_help)


def _add_hardware(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--devices", type=count, required=True, metavar="N", help="how many there are, in whole nodes"
    )
    add_instances(group)
    price_help = "price of a device for an hour; the table says what a million tokens cost within the SLOs"
    group.add_argument("--device-price", type=positive, metavar="X", help=price_help)
    gpus_help = "of an instance (default: the best number)"
    group.add_argument("--gpus", type=count, dest="num_gpus", metavar="N", help=gpus_help)


def _add_slos(group: argparse._ArgumentGroup) -> None:
    for slo, meaning in (("ttft", "of a first token"), ("tbt", "between two tokens")):
        group.add_argument(
            f"--{slo}-slo",
            type=positive,
            dest=f"{slo}_slo_s",
            required=True,
            metavar="SECONDS",
            help=f"longest time {meaning}",
        )
    attainment_help = "share of the requests that must be within both (default: %(default)s)"
    group.add_argument("--attainment", type=share, default=0.9, metavar="SHARE", help=attainment_help)
