"""`mooncake-bench`: loads OpenAI-compatible servers, and fits synthetic loads to traces.

Owns: the command line. Does not know: how loads are made and sent.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.tools.arguments import count, lengths, not_negative, positive
from benchmarks.tools.load.measures import Slo
from benchmarks.tools.load.pictures import draw
from benchmarks.tools.load.report import Report, print_report, save_report
from benchmarks.tools.load.sources import Load, MixSource, Run, Source, SyntheticSource, TraceSource
from benchmarks.tools.traces.fitting import fit
from benchmarks.tools.traces.mixes import MIXES, Mix, RequestClass
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.synthetic import SyntheticLoad
from mooncake.cli.command_line import INTERRUPTED, Parser, exit_code
from mooncake.config.spelling import did_you_mean
from mooncake.errors import ConfigError

TTFT_SLO_S, TBT_SLO_S = 5.0, 0.15
LONG_FROM = 1024


EXAMPLES = """examples:
  mooncake-bench run http://127.0.0.1:8000 --lengths 512/64 --concurrency 8 --num-requests 100
  mooncake-bench run http://127.0.0.1:8000 --mix chat-and-documents --rates 1,2,4 --duration 60 --out FOLDER
  mooncake-bench fit trace.jsonl --out load.json
  mooncake-bench run http://127.0.0.1:8000 --synthetic load.json --num-requests 500

docs/benchmarking.md has the method.
Exit codes: 0, 1 if something failed, 2 for wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    """Run the `mooncake-bench` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0, 1 after a failure, 2 for wrong use, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["mooncake-bench", *arguments])
    return exit_code(lambda: options.command(options))


# -- commands ---------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    try:
        from benchmarks.tools.load.bench import Bench, find_server
        from benchmarks.tools.load.clients import Clients
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}: sending needs more packages; in the clone, `make install`, or"
            " `.venv/bin/pip install --editable '.[bench]'`"
        ) from None
    source, slo = _source(options), _slo(options)
    loads = _loads(options, source)
    if options.num_requests is None and options.duration is None and not isinstance(source, TraceSource):
        raise ConfigError("this load has no end: say --num-requests or --duration")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        source=source,
        seed=options.seed,
        num_requests=options.num_requests,
        duration_s=options.duration,
        scale_lengths=options.scale_lengths,
        token_ids=options.token_ids,
        as_text=options.text,
        ignore_eos=not options.no_ignore_eos,
        timeout_s=options.timeout,
    )
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    servers = [
        find_server(url, options.model, options.context_len) for url in (options.url, *options.against)
    ]
    bench = Bench(servers, loads, run, options.rounds)
    with Clients(options.processes) as clients:
        bench.measure(clients)
    runs = bench.measured(slo)
    report = Report(options.command_line, started_at, slo, runs)
    print_report(report)
    if options.out is not None:
        outcomes = bench.outcomes()
        named = [(r.server, r.load, of_run) for r, of_run in zip(runs, outcomes, strict=True)]
        save_report(report, named, options.out)
        try:
            draw(runs, outcomes, slo, options.out)
        except ImportError:
            print("no pictures: they need matplotlib (pip install matplotlib)", file=sys.stderr)
        print(f"everything is in {options.out}", file=sys.stderr)
    return INTERRUPTED if bench.was_interrupted else 0


def _fit(options: argparse.Namespace) -> int:
    trace = TraceFile(options.trace)
    summary, load = fit(trace)
    for name, value in summary._asdict().items():
        print(f"{name}\t{value:.6g}")
    for name in ("rate_per_s", "burstiness", "follow_up_share", "shared_prefix_tokens"):
        print(f"{name}\t{getattr(load, name):.6g}")
    if trace.repairs:
        print(f"repaired: {trace.repairs}", file=sys.stderr)
    if options.out is not None:
        load.save(options.out)
    return 0


# -- options ----------------------------------------------------------------------------------------


def _source(options: argparse.Namespace) -> Source:
    """Return the source that the options describe. Raises TraceError, ConfigError."""
    if options.trace is not None:
        trace = TraceFile(options.trace)
        for _ in trace:  # faults are reported before anything is sent
            pass
        if trace.repairs:
            print(f"{options.trace}: {trace.repairs}", file=sys.stderr)
        return TraceSource(options.trace, options.speed, options.jitter)
    if options.speed != 1 or options.jitter:
        raise ConfigError("--speed and --jitter are for a --trace; other loads have --rates and --burstiness")
    if options.synthetic is not None:
        return SyntheticSource(SyntheticLoad.load(options.synthetic))
    return MixSource(options.mix or options.lengths, options.burstiness)


def _loads(options: argparse.Namespace, source: Source) -> list[Load]:
    """Return the loads that the options describe. Raises ConfigError."""
    if options.concurrency:
        return [Load(f"concurrency {number}", None, number) for number in options.concurrency]
    if isinstance(source, TraceSource):
        if options.rates:
            raise ConfigError("a --trace has its own rate: change it with --speed")
        return [Load(f"{options.trace.name} x{options.speed:g}", None, None)]
    if options.rates:
        return [Load(f"{rate:g} req/s", rate, None) for rate in options.rates]
    if isinstance(source, SyntheticSource):
        return [Load(f"{source.load.rate_per_s:g} req/s", source.load.rate_per_s, None)]
    raise ConfigError("say how many requests to send: --rates (open loop) or --concurrency (closed loop)")


def _slo(options: argparse.Namespace) -> Slo:
    mix: Mix | None = options.mix
    ttft_s, tbt_s = (mix.ttft_slo_s, mix.tbt_slo_s) if mix else (TTFT_SLO_S, TBT_SLO_S)
    return Slo(options.ttft_slo or ttft_s, options.tbt_slo or tbt_s, options.long_from)


def _parser() -> Parser:
    parser = Parser(
        prog="mooncake-bench",
        description="Load OpenAI-compatible servers and measure what their users see.",
        epilog=EXAMPLES,
    )
    parser.add_version()
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "send a load to a server, or to several in turn"
    run_parser = commands.add_parser("run", help=text, description=text.capitalize() + ".", epilog=EXAMPLES)
    run_parser.set_defaults(command=_run)
    _add_load_options(run_parser)
    _add_run_options(run_parser)
    text = "print a trace's figures, and the parameters of a synthetic load that resembles it"
    fit_parser = commands.add_parser("fit", help=text, description=text.capitalize() + ".")
    fit_parser.set_defaults(command=_fit)
    fit_parser.add_argument("trace", type=Path, metavar="TRACE", help="as for run --trace")
    fit_parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the parameters for run --synthetic"
    )
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load")
    kind = group.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Mooncake's format (.jsonl), or .csv with arrival, input and output; either may be .gz",
    )
    kind.add_argument("--synthetic", type=Path, metavar="FILE", help="parameters that `fit` has written")
    kind.add_argument("--mix", type=_mix, metavar="NAME", help=f"one of {', '.join(MIXES)}")
    kind.add_argument("--lengths", type=_lengths, metavar="IN/OUT", help="tokens of every request, as 128/64")
    group.add_argument("--rates", type=_floats, metavar="R,...", help="requests a second, one run for each")
    group.add_argument(
        "--concurrency",
        type=_ints,
        metavar="N,...",
        help="closed loop: so many at any time, one run for each",
    )
    group.add_argument("--num-requests", type=count, metavar="N", help="of a run")
    group.add_argument("--duration", type=positive, metavar="SECONDS", help="requests are sent for so long")
    group.add_argument(
        "--speed", type=positive, default=1.0, metavar="X", help="2 plays a trace in half its time"
    )
    group.add_argument(
        "--jitter",
        type=not_negative,
        default=0.0,
        metavar="SECONDS",
        help="spread requests of one tick of a trace's clock over so long; 3 for Mooncake's; default: 0",
    )
    group.add_argument(
        "--burstiness",
        type=not_negative,
        default=1.0,
        metavar="B",
        help="of --mix and --lengths: variance of arrivals by their mean; default: 1, a Poisson process",
    )
    group.add_argument(
        "--scale-lengths", type=positive, default=1.0, metavar="X", help="0.1 makes all lengths a tenth"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="another one sends other prompts, which no cache holds yet; default: 0",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    servers = parser.add_argument_group("the servers")
    servers.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="URL",
        help="another server, loaded in turn with the first",
    )
    servers.add_argument("--rounds", type=count, default=1, metavar="N", help="runs of each load; default: 1")
    servers.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    servers.add_argument(
        "--context-len",
        type=count,
        metavar="TOKENS",
        help="longer requests are left out; default: what the server says of its model",
    )
    sending = parser.add_argument_group("how requests are sent")
    sending.add_argument("--text", action="store_true", help="send prompts as text, not as token ids")
    sending.add_argument(
        "--token-ids",
        type=_id_range,
        default=(1000, 30_000),
        metavar="A:B",
        help="prompts are drawn from ids A to B-1; default: 1000:30000",
    )
    sending.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early, for servers without `ignore_eos`"
    )
    sending.add_argument(
        "--timeout", type=positive, default=600.0, metavar="SECONDS", help="of a request; default: 600"
    )
    sending.add_argument(
        "--processes", type=count, default=1, metavar="N", help="that send requests; default: 1"
    )
    results = parser.add_argument_group("the results")
    mix_or = "the mix's, or"
    results.add_argument(
        "--ttft-slo", type=positive, metavar="SECONDS", help=f"default: {mix_or} {TTFT_SLO_S:g}"
    )
    results.add_argument(
        "--tbt-slo", type=positive, metavar="SECONDS", help=f"default: {mix_or} {TBT_SLO_S:g}"
    )
    results.add_argument(
        "--long-from",
        type=count,
        default=LONG_FROM,
        metavar="TOKENS",
        help=f"input tokens that make a request a long one; default: {LONG_FROM}",
    )
    results.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write report.json, every request, and pictures there"
    )


def _floats(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]


def _ints(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _id_range(text: str) -> tuple[int, int]:
    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise argparse.ArgumentTypeError(f"expected A:B with 0 <= A < B, got {text}")
    return int(start), int(end)


def _lengths(text: str) -> Mix:
    num_input, num_output = lengths(text)
    return Mix((RequestClass(1.0, num_input, num_output),), TTFT_SLO_S, TBT_SLO_S)


def _mix(text: str) -> Mix:
    if text not in MIXES:
        meant = did_you_mean(text, MIXES)
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(MIXES)}, got {text}{meant}")
    return MIXES[text]
