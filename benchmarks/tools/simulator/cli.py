"""The command `mooncake-sim`, which simulates a cluster under a load.

Owns: the command line. Does not know: how clusters are simulated.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.tools.arguments import count, not_negative, one_of, positive
from benchmarks.tools.simulator.arguments import add_instances, add_source, add_weights, setup_of, weights_of
from benchmarks.tools.simulator.pictures import Drawn, draw
from benchmarks.tools.simulator.report import Report, print_report
from benchmarks.tools.simulator.series import LoadSeries
from benchmarks.tools.simulator.setup import Join, Leave, Setup, simulate
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import at_speed, jittered, until
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize
from mooncake.cli.command_line import Parser, exit_code
from mooncake.cli.steps import StepDisplay
from mooncake.config.policies import EvictionPolicy, Overload, Scheduling
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role

EXAMPLES = """examples:
  mooncake-sim --trace trace.jsonl --prefill 4 --decode 4 --ttft-slo 30 --tbt-slo 0.1
  mooncake-sim --trace trace.jsonl --prefill 4 --decode 4 --speed 1 2 4 --out FOLDER
  mooncake-sim --synthetic load.json --num-requests 2000 --coupled 8

docs/simulator.md says what is modelled. Times are simulated: they say how policies compare, not what your
machines will do. Exit codes: 0, 1 if something failed, 2 for wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    """Run the `mooncake-sim` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0, 1 after a failure, 2 for wrong use, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _simulate(options, ["mooncake-sim", *arguments]))


def _simulate(options: argparse.Namespace, command: Sequence[str]) -> int:
    options.joins, options.leaves = tuple(options.joins or ()), tuple(options.leaves or ())
    setup, weights = setup_of(options), weights_of(options)
    setup.shape()  # faults are reported before the trace is read
    _refuse_idle(options, setup)
    loads, num_requests = _loads(options)
    drawn = []
    with StepDisplay() as steps:
        for name, load in loads:
            show = partial(steps.show, f"{setup.name}, {name}", total=num_requests)
            series = LoadSeries(setup.slos) if setup.num_prefill else None
            watched = _watched(load(), show)
            simulated, results = simulate(setup, watched, name, series)
            drawn.append(Drawn(simulated, results, series))
    report = Report(shlex.join(command), msgspec.to_builtins(setup), [d.run for d in drawn], weights)
    print_report(report, Console())
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report.save(options.out)
        try:
            draw(drawn, setup.slos, options.out)
        except ImportError:
            print("no pictures: they need matplotlib (pip install matplotlib)", file=sys.stderr)
        print(f"everything is in {options.out}", file=sys.stderr)
    return 0


_PAIRS, _COUPLED = "--prefill and --decode instances", "--coupled instances"
_CONDUCTOR = "instances under a Conductor"
_NEEDED = {
    "chunk_tokens": ("--chunk", _COUPLED),
    "inlining": ("--inlining", _PAIRS),
    "rebalancing": ("--rebalance", _PAIRS),
    "joins": ("--join", _CONDUCTOR),
    "leaves": ("--leave", _CONDUCTOR),
    "prefill_layer_window": ("--prefill-layer-window", _PAIRS),
    "scheduling": ("--scheduling", _PAIRS),
    "kvcache_balancing_threshold": ("--kvcache-balancing-threshold", _PAIRS),
    "nic_gbps": ("--nic-gbps", _PAIRS),
    "prefill_chunk": ("--prefill-chunk", _CONDUCTOR),
    "overload": ("--overload", _CONDUCTOR),
    "max_waiting": ("--max-waiting", _CONDUCTOR),
}
"""The option of each field, and the kind of cluster in which the field has an effect."""


def _refuse_idle(options: argparse.Namespace, setup: Setup) -> None:
    """Refuse options that have no effect in this cluster. Raises ConfigError."""
    has = {_COUPLED} if setup.num_coupled else {_CONDUCTOR, _PAIRS} if setup.num_prefill else {_CONDUCTOR}
    for name, (option, needed) in _NEEDED.items():
        if getattr(options, name) not in (None, False, ()) and needed not in has:
            raise ConfigError(f"{option} is for {needed}: it changes nothing in {setup.name}")
    if setup.num_coupled and not options.rejects:
        raise ConfigError("--no-rejection is for a Conductor: coupled instances reject nothing")


def _timed(text: str) -> tuple[float, str]:
    """Parse a time in seconds and a word, such as `60:decode`."""
    seconds, _, word = text.partition(":")
    if not word:
        raise argparse.ArgumentTypeError(f"expected SECONDS:WORD, got {text!r}")
    return not_negative(seconds), word


def _join(text: str) -> Join:
    at_s, role = _timed(text)
    return Join(at_s, one_of(Role)(role))


def _leave(text: str) -> Leave:
    return Leave(*_timed(text))


def _watched(load: Iterable[TraceRequest], show: Callable[[int], None]) -> Iterator[TraceRequest]:
    for number, request in enumerate(load, 1):
        if number % 100 == 1:
            show(number)
        yield request


_Load = tuple[str, Callable[[], Iterator[TraceRequest]]]


def _loads(options: argparse.Namespace) -> tuple[list[_Load], int | None]:
    """Return the loads with their names, and the number of requests if it is known.

    Raises ConfigError or TraceError.
    """
    if options.trace is not None:
        if options.rate:
            raise ConfigError("a --trace has its own rate: change it with --speed")
        trace = TraceFile(options.trace)
        num_requests = sum(1 for _ in trace)
        if trace.repairs:
            print(f"{options.trace}: {trace.repairs}", file=sys.stderr)
        loads = [(f"x{speed:g}", _trace_load(options, speed)) for speed in options.speed]
        return loads, min(num_requests, options.num_requests or num_requests)
    if options.speed != [1.0]:
        raise ConfigError("--speed is for a --trace; synthetic loads have --rate")
    if options.num_requests is None and options.duration is None:
        raise ConfigError("a synthetic load has no end: say --num-requests or --duration")
    synthetic = SyntheticLoad.load(options.synthetic)
    rates = options.rate or [synthetic.rate_per_s]
    return [
        (f"{rate:g} req/s", _synthetic_load(options, synthetic, rate)) for rate in rates
    ], options.num_requests


def _trace_load(options: argparse.Namespace, speed: float) -> Callable[[], Iterator[TraceRequest]]:
    def load() -> Iterator[TraceRequest]:
        requests = jittered(TraceFile(options.trace), options.jitter, options.seed)
        return _cut(options, at_speed(requests, speed))

    return load


def _synthetic_load(
    options: argparse.Namespace, synthetic: SyntheticLoad, rate_per_s: float
) -> Callable[[], Iterator[TraceRequest]]:
    of_rate = msgspec.structs.replace(synthetic, rate_per_s=rate_per_s)
    return lambda: _cut(options, synthesize(of_rate, options.seed))


def _cut(options: argparse.Namespace, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    if options.duration is not None:
        requests = until(requests, options.duration)
    return itertools.islice(requests, options.num_requests)


def _parser() -> Parser:
    parser = Parser(
        prog="mooncake-sim",
        description="Simulate a cluster: the server's own Conductor and eviction on a virtual clock.",
        epilog=EXAMPLES,
    )
    parser.add_version()
    _add_load(parser.add_argument_group("load"))
    _add_cluster(parser.add_argument_group("cluster"))
    _add_policies(parser.add_argument_group("policies and SLOs"))
    add_weights(parser.add_argument_group("objective"), "print")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="report.json and pictures go here")
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_source(group)
    speed_help = "2 replays two hours in one; several: a run each"
    group.add_argument("--speed", type=positive, nargs="+", default=[1.0], metavar="X", help=speed_help)
    rate_help = "requests/s of a synthetic load; several: a run each"
    group.add_argument("--rate", type=positive, nargs="+", metavar="X", help=rate_help)
    group.add_argument("--num-requests", type=count, metavar="N", help="no more than these")
    group.add_argument("--duration", type=positive, metavar="SECONDS", help="what arrives in this time")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prefill", type=count, dest="num_prefill", metavar="N", help="prefill instances")
    group.add_argument("--decode", type=count, dest="num_decode", metavar="N", help="decode instances")
    both_help = "instances with both roles, under the Conductor"
    group.add_argument("--both", type=count, dest="num_both", metavar="N", help=both_help)
    inlining_help = "decode instances compute prompts too, where that adds the least waiting"
    group.add_argument("--inlining", action="store_true", help=inlining_help)
    rebalance_help = "change roles as the load does, and move running requests where SLOs want it"
    group.add_argument("--rebalance", action="store_true", dest="rebalancing", help=rebalance_help)
    move_help = "layers of decode instances move to less used instances (BanaServe's Algorithm 1)"
    group.add_argument("--move-layers", action="store_true", dest="moves_layers", help=move_help)
    join_help = "an instance of this role joins then (prefill, decode or both)"
    group.add_argument("--join", type=_join, nargs="+", dest="joins", metavar="SECONDS:ROLE", help=join_help)
    leave_help = "an instance drains and leaves then (such as decode-0)"
    group.add_argument(
        "--leave", type=_leave, nargs="+", dest="leaves", metavar="SECONDS:NAME", help=leave_help
    )
    coupled_help = "instances that do both, without Conductor"
    group.add_argument("--coupled", type=count, dest="num_coupled", metavar="N", help=coupled_help)
    chunk_help = "tokens of an iteration of coupled ones (default: whole prompts)"
    group.add_argument("--chunk", type=count, dest="chunk_tokens", metavar="TOKENS", help=chunk_help)
    add_instances(group)
    gpus_help = "of an instance (default: the whole node)"
    group.add_argument("--gpus", type=count, dest="num_gpus", metavar="N", help=gpus_help)
    block_help = "of a block of KVCache, and least of a chunk (default: 512, as in traces)"
    group.add_argument("--block-tokens", type=count, metavar="TOKENS", help=block_help)
    group.add_argument("--prefill-chunk", type=count, metavar="TOKENS", help="tokens of a prefill pass")
    window_help = "prefill with device memory for some layers at a time"
    group.add_argument("--prefill-layer-window", action="store_true", help=window_help)
    group.add_argument("--max-batch", type=count, metavar="N", help="requests that are decoded together")


def _add_policies(group: argparse._ArgumentGroup) -> None:
    for option, policies, policy_help in (
        ("--scheduling", Scheduling, "how prefill instances are chosen"),
        ("--overload", Overload, "what refuses requests that would miss an SLO"),
        ("--eviction", EvictionPolicy, "which block goes first from a full pool"),
    ):
        group.add_argument(option, type=one_of(policies), choices=list(policies), help=policy_help)
    waiting_help = "requests that wait for decode's load to fall instead of being rejected (default: 0)"
    group.add_argument("--max-waiting", type=count, metavar="N", help=waiting_help)
    threshold_help = "fetch a prefix from elsewhere if it is so many times as long as the own one"
    group.add_argument("--kvcache-balancing-threshold", type=positive, metavar="X", help=threshold_help)
    ttft_help = "longest time of a first token; default: any"
    group.add_argument("--ttft-slo", type=positive, dest="ttft_slo_s", metavar="SECONDS", help=ttft_help)
    tbt_help = "longest time between two tokens; default: any"
    group.add_argument("--tbt-slo", type=positive, dest="tbt_slo_s", metavar="SECONDS", help=tbt_help)
    rejection_help = "measure by the SLOs, reject nothing"
    group.add_argument("--no-rejection", action="store_false", dest="rejects", help=rejection_help)
