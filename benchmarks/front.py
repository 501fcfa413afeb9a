"""What the front costs: processor time of a request, and the latency that it adds.

    python benchmarks/front.py [--rates R,R] [--num-requests N] [--rounds N] [--processes N] [--fronts N]

The conductor process, front included, with instances that compute nothing (`load.instant_workers`): a
request of 1,000 tokens of text is parsed, validated, tokenized, placed, dispatched, and answered by 64
tokens, each an event of its own, every 20 ms. Beside it a bare FastAPI application that streams as many
events and does nothing else. The two are loaded in turn, at the same rates, by the clients of
`mooncake-bench`. TTFT and gaps beyond 20 ms are what the front adds. Processor time is that of the
server's process alone.

With `--fronts N` the load goes to N fronts in processes of their own, and the Conductor's process decides.
Processor time is that of all of them then, and what the Conductor has of it is shown beside.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.load.bench import find_server
from benchmarks.load.clients import Clients
from benchmarks.load.instant_workers import STEP_S
from benchmarks.load.measures import Slo, summarize
from benchmarks.load.sources import MixSource, Run
from benchmarks.servers import ServerError, free_port, heeding_sigterm, serving
from benchmarks.store.rounds import print_table, progress
from benchmarks.traces.mixes import Mix, RequestClass
from mooncake.keys import ClusterKey

NUM_INPUT, NUM_OUTPUT = 1000, 64
MAX_CPU_MS = 3.3
MAX_ADDED_MS = 20.0
OURS, BARE = "front and Conductor", "bare FastAPI"
_ANY_TIME = Slo(600.0, 600.0, NUM_INPUT + 1)


class Server(NamedTuple):
    """One that is ready. `pid` is the process whose processor time counts. `fronts` take its requests, if
    there are any."""

    url: str
    pid: int
    fronts: tuple["Server", ...] = ()

    @property
    def pids(self) -> list[int]:
        return [self.pid, *(front.pid for front in self.fronts)]


class Sample(NamedTuple):
    """Of one round, or the medians of several, in ms. `own_cpu` is without that of other fronts."""

    cpu: float
    own_cpu: float
    ttft_p50: float
    ttft_p99: float
    tbt_p99: float
    client_cpu_share: float


@contextlib.contextmanager
def front(num_each: int = 1, num_fronts: int = 0) -> Iterator[Server]:
    """With so many prefill and decode instances, and fronts beside the Conductor's. Raises ServerError."""
    with heeding_sigterm(), tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "cluster.key"
        ClusterKey.generate().save(key)
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        cluster = ["--security-key-file", str(key), "--conductor-endpoint", endpoints[0]]
        conductor = ["conductor", *cluster, "--conductor-reply-endpoint", endpoints[1]]
        conductor += ["--conductor-max-running-requests", "10000"]
        other = ["front", *cluster, "--conductor-reply-endpoint", "tcp://127.0.0.1:*"]
        instant = [sys.executable, "-m", "benchmarks.load.instant_workers", *cluster]
        instant += ["--prefill", str(num_each), "--decode", str(num_each)]
        workers = subprocess.Popen(instant)
        try:
            with contextlib.ExitStack() as nodes:
                ours = nodes.enter_context(_node(conductor))
                others = [nodes.enter_context(_node(other)) for _ in range(num_fronts)]
                yield ours._replace(fronts=tuple(others))
        finally:
            workers.terminate()
            workers.wait()


@contextlib.contextmanager
def _node(arguments: Sequence[str]) -> Iterator[Server]:
    """Of this role."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mooncake", "--port", str(port), "--role", *arguments]
    with serving(command, f"{url}/ready") as supervisor:
        # It has no other child.
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        yield Server(url, int(children.read_text()))


@contextlib.contextmanager
def bare() -> Iterator[Server]:
    """Raises ServerError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.load.bare_front", str(port)]
    with serving(command, f"{url}/v1/models") as process:
        yield Server(url, process.pid)


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(clients: Clients, server: Server, run: Run) -> Sample:
    """One round. Raises ServerError if a request fails."""
    found = find_server(server.url, None, None)
    before_s = [cpu_s(pid) for pid in server.pids]
    wanted, urls = replace(run, url=found.url, model=found.model), [front.url for front in server.fronts]
    result = clients.run(wanted, lambda _: None, urls)
    spent_s = [cpu_s(pid) - before for pid, before in zip(server.pids, before_s, strict=True)]
    figures = summarize(result, _ANY_TIME)
    if result.was_interrupted:
        raise KeyboardInterrupt
    if figures.num_failed or figures.num_rejected or figures.ttft_s is None or figures.tbt_s is None:
        raise ServerError(f"of {run.num_requests} requests {figures.num_failed} failed: {figures.errors}")
    return Sample(
        1000 * sum(spent_s) / figures.num_requests,
        1000 * spent_s[0] / figures.num_requests,
        1000 * figures.ttft_s.p50,
        1000 * figures.ttft_s.p99,
        1000 * (figures.tbt_s.p99 - STEP_S),
        figures.client.max_cpu_share,
    )


def in_rounds(rates: Sequence[float], num_rounds: int, num_processes: int, num_fronts: int, run: Run) -> None:
    """Print the table. Raises ServerError."""
    rows = []
    with front(num_fronts=num_fronts) as ours, bare() as floor, Clients(num_processes) as clients:
        servers = {OURS: ours, BARE: floor}
        for server in servers.values():  # first calls allocate
            measure(clients, server, replace(run, concurrency=8, num_requests=64))
        for rate in rates:
            samples: dict[str, list[Sample]] = {name: [] for name in servers}
            for index in range(num_rounds):
                progress(f"{rate:g} requests/s, round {index + 1} of {num_rounds}")
                for name in sorted(servers, reverse=bool(index % 2)):
                    seeded = replace(run, rate_per_s=rate, seed=run.seed + index)
                    samples[name].append(measure(clients, servers[name], seeded))
            for name, of_server in samples.items():
                medians = Sample(*map(statistics.median, zip(*of_server, strict=True)))
                rows.append(_row(rate, name, medians))
    print_table(
        "Front",
        (
            "requests/s",
            "",
            "CPU a request",
            "of it without other fronts",
            "TTFT p50",
            "TTFT p99",
            "TBT p99 beyond the step",
            "client's CPU",
        ),
        rows,
        f"Bars for ours: {MAX_CPU_MS} ms of CPU, and at half the rate that it allows a core, "
        f"{500 / MAX_CPU_MS:.0f} requests/s, {MAX_ADDED_MS:.0f} ms of added latency at p99.",
    )


def _row(rate: float, name: str, sample: Sample) -> tuple[str, ...]:
    times = (sample.cpu, sample.own_cpu, sample.ttft_p50, sample.ttft_p99, sample.tbt_p99)
    return (f"{rate:g}", name, *(f"{value:.2f} ms" for value in times), f"{sample.client_cpu_share:.0%}")


def load() -> Run:
    """The requests; how many, and how they follow each other, is to be said."""
    return Run(
        url="",
        model="",
        source=MixSource(Mix((RequestClass(1.0, NUM_INPUT, NUM_OUTPUT),), 1.0, 1.0), 1.0),
        rate_per_s=None,
        concurrency=None,
        seed=0,
        num_requests=None,
        duration_s=None,
        scale_lengths=1.0,
        context_len=None,
        token_ids=(1000, 30_000),
        as_text=True,
        ignore_eos=True,
        timeout_s=600.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="50,150", metavar="R,R", help="requests a second; default: 50,150")
    parser.add_argument("--num-requests", type=int, default=500, metavar="N", help="a round; default: 500")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="clients; default: 2")
    parser.add_argument(
        "--fronts", type=int, default=0, metavar="N", help="beside the Conductor's own; default: 0"
    )
    options = parser.parse_args()
    if options.fronts and options.processes % options.fronts:
        parser.error(
            f"--processes {options.processes} cannot be divided evenly among {options.fronts} fronts"
        )
    run = replace(load(), num_requests=options.num_requests)
    rates = [float(rate) for rate in options.rates.split(",")]
    try:
        in_rounds(rates, options.rounds, options.processes, options.fronts, run)
    except ServerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
