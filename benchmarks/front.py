"""What the front costs: processor time of a request, and the latency that it adds.

    python benchmarks/front.py [--connections N,N] [--turns N] [--rates R,R] [--num-requests N] [--rounds N]
                               [--processes N] [--fronts N]

The conductor process, front included, with instances that compute nothing (`load.instant_workers`): a
request of 1,000 tokens of text is parsed, validated, tokenized, placed, dispatched, and answered by 64
tokens, each an event of its own, every 20 ms. Beside it a bare FastAPI application that streams as many
events and does nothing else. The two are loaded in turn.

Processor time is that of the server's process, all threads, under the load of wrk (`load.wrk`): connections
that stay open, each with its next request as soon as it has the answer to the one before. Latency is what the
clients of `mooncake-bench` see, who know when each event came, at a rate: TTFT, and gaps beyond 20 ms.

With `--fronts N` the load goes to N fronts in processes of their own, and the Conductor's process decides.
Processor time is that of all of them then, and what the Conductor has of it is shown beside.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import msgspec

from benchmarks.debian import CannotFetchError
from benchmarks.load.bench import find_server
from benchmarks.load.clients import ClientError, Clients
from benchmarks.load.fronts import Server, bare, cpu_s, front
from benchmarks.load.instant_workers import STEP_S
from benchmarks.load.measures import Slo, summarize
from benchmarks.load.prompts import PromptMaker
from benchmarks.load.sources import MixSource, Planned, Run
from benchmarks.load.wrk import Wrk, WrkError
from benchmarks.servers import ServerError
from benchmarks.store.rounds import print_table, progress
from benchmarks.traces.mixes import Mix, RequestClass

NUM_INPUT, NUM_OUTPUT = 1000, 64
MAX_CPU_MS, MAX_CPU_RATIO = 3.3, 1.12
MAX_ADDED_MS = 20.0
OURS, BARE = "front and Conductor", "bare FastAPI"
_TOKEN_IDS = (1000, 30_000)
_ANY_TIME = Slo(600.0, 600.0, NUM_INPUT + 1)
_WARM_UP_CONNECTIONS, _WARM_UP_TURNS = 32, 2


class Cost(NamedTuple):
    """Processor time of a request, of one round or the median of several. `own_cpu_ms` is without that of
    other fronts."""

    rate_per_s: float
    cpu_ms: float
    own_cpu_ms: float
    answer_bytes: float


class Latency(NamedTuple):
    """Of one round, or the medians of several."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p99_ms: float
    """beyond the step"""
    client_cpu_share: float


S = TypeVar("S", Cost, Latency)


def cost(wrk: Wrk, server: Server, num_connections: int, num_turns: int, seed: int) -> Cost:
    """One round. Raises WrkError if an answer is not whole."""
    model = find_server(server.url, None, None).model
    urls = [front.url for front in server.fronts] or [server.url]
    shares = [
        (url, _bodies(model, num_turns * num_connections // len(urls), seed * len(urls) + index))
        for index, url in enumerate(urls)
    ]
    connections = num_connections // len(urls)
    before_s = [cpu_s(pid) for pid in server.pids]
    with ThreadPoolExecutor() as threads:
        answers = list(
            threads.map(
                lambda share: wrk.post(*share, NUM_OUTPUT, connections, NUM_OUTPUT * STEP_S),
                shares,
            )
        )
    spent_s = [cpu_s(pid) - before for pid, before in zip(server.pids, before_s, strict=True)]
    num_requests = sum(len(bodies) for _, bodies in shares)
    return Cost(
        sum(answer.rate_per_s for answer in answers),
        1000 * sum(spent_s) / num_requests,
        1000 * spent_s[0] / num_requests,
        statistics.mean(answer.mean_bytes for answer in answers),
    )


def _bodies(model: str, number: int, seed: int) -> list[bytes]:
    """Requests for as many different prompts."""
    prompts = PromptMaker(_TOKEN_IDS, seed, 1.0)
    fixed = {"model": model, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    return [
        msgspec.json.encode({**fixed, "prompt": prompts.text(Planned(index, 0.0, NUM_INPUT, NUM_OUTPUT, ()))})
        for index in range(number)
    ]


def latency(clients: Clients, server: Server, run: Run) -> Latency:
    """One round. Raises ServerError if a request fails."""
    found = find_server(server.url, None, None)
    wanted, urls = replace(run, url=found.url, model=found.model), [front.url for front in server.fronts]
    result = clients.run(wanted, lambda _: None, urls)
    figures = summarize(result, _ANY_TIME)
    if result.was_interrupted:
        raise KeyboardInterrupt
    if figures.num_failed or figures.num_rejected or figures.ttft_s is None or figures.tbt_s is None:
        raise ServerError(f"of {run.num_requests} requests {figures.num_failed} failed: {figures.errors}")
    return Latency(
        1000 * figures.ttft_s.p50,
        1000 * figures.ttft_s.p99,
        1000 * (figures.tbt_s.p99 - STEP_S),
        figures.client.max_cpu_share,
    )


def in_turn(ours: Server, floor: Server, num_rounds: int, measure: Callable[[Server, int], S]) -> tuple[S, S]:
    """Medians of both. `measure` gets the round's number as well; each round begins with the other server."""
    of_ours: list[S] = []
    of_floor: list[S] = []
    sides = [(of_ours, ours), (of_floor, floor)]
    for index in range(num_rounds):
        progress(f"round {index + 1} of {num_rounds}")
        for samples, server in reversed(sides) if index % 2 else sides:
            samples.append(measure(server, index))
    return _medians(of_ours), _medians(of_floor)


def _medians(samples: list[S]) -> S:
    return samples[0]._make(map(statistics.median, zip(*samples, strict=True)))


def print_costs(
    ours: Server, floor: Server, connections: Sequence[int], num_turns: int, num_rounds: int
) -> None:
    """Raises WrkError, CannotFetchError."""
    wrk = Wrk()
    rows = []
    for server in (ours, floor):  # first calls allocate
        cost(wrk, server, _WARM_UP_CONNECTIONS, _WARM_UP_TURNS, 0)
    for number in connections:
        progress(f"{number} connections")
        of_ours, of_floor = in_turn(
            ours,
            floor,
            num_rounds,
            lambda server, index, number=number: cost(wrk, server, number, num_turns, 1 + index),
        )
        for name, sample in ((OURS, of_ours), (BARE, of_floor)):
            rows.append(
                (
                    str(number),
                    name,
                    f"{sample.rate_per_s:.0f}",
                    f"{sample.cpu_ms:.2f} ms",
                    f"{sample.own_cpu_ms:.2f} ms",
                    f"{sample.cpu_ms / of_floor.cpu_ms:.2f}",
                    f"{sample.answer_bytes / 1024:.1f} KiB",
                )
            )
    print_table(
        "Front: processor time",
        (
            "connections",
            "",
            "requests/s",
            "CPU a request",
            "of it without other fronts",
            "of bare FastAPI's",
            "an answer",
        ),
        rows,
        f"Bar: {MAX_CPU_MS} ms, which is {MAX_CPU_RATIO} of what bare FastAPI took where that was set.",
    )


def print_latencies(
    ours: Server, floor: Server, rates: Sequence[float], num_rounds: int, num_processes: int, run: Run
) -> None:
    """Raises ServerError, ClientError."""
    rows = []
    with Clients(num_processes) as clients:
        for server in (ours, floor):
            latency(clients, server, replace(run, concurrency=8, num_requests=64))
        for rate in rates:
            progress(f"{rate:g} requests/s")
            at_rate = replace(run, rate_per_s=rate)
            of_ours, of_floor = in_turn(
                ours,
                floor,
                num_rounds,
                lambda server, index, run=at_rate: latency(
                    clients, server, replace(run, seed=run.seed + index)
                ),
            )
            for name, sample in ((OURS, of_ours), (BARE, of_floor)):
                added_ms = sample.ttft_p99_ms - of_floor.ttft_p99_ms
                times_ms = (*sample[:2], added_ms, sample.tbt_p99_ms)
                shown = [f"{time_ms:.1f} ms" for time_ms in times_ms]
                rows.append((f"{rate:g}", name, *shown, f"{sample.client_cpu_share:.0%}"))
    print_table(
        "Front: latency",
        (
            "requests/s",
            "",
            "TTFT p50",
            "TTFT p99",
            "beyond bare FastAPI's",
            "TBT p99 beyond the step",
            "client's CPU",
        ),
        rows,
        f"Bar: at half the rate that {MAX_CPU_MS} ms allow a core, {500 / MAX_CPU_MS:.0f} requests/s, "
        f"{MAX_ADDED_MS:.0f} ms of added latency at p99.",
    )


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
        token_ids=_TOKEN_IDS,
        as_text=True,
        ignore_eos=True,
        timeout_s=600.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--connections", default="64,192,384", metavar="N,N", help="of wrk; default: 64,192,384; '': none"
    )
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="requests of each; default: 8")
    parser.add_argument(
        "--rates", default="150", metavar="R,R", help="requests a second; default: 150; '': none"
    )
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
    connections = [int(number) for number in options.connections.split(",") if number]
    rates = [float(rate) for rate in options.rates.split(",") if rate]
    try:
        with front(num_fronts=options.fronts) as ours, bare() as floor:
            if connections:
                print_costs(ours, floor, connections, options.turns, options.rounds)
            if rates:
                print_latencies(ours, floor, rates, options.rounds, options.processes, run)
    except (ServerError, ClientError, WrkError, CannotFetchError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
