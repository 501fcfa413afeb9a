"""The costs of the front: the processor time of a request, and the added latency.

    python -m benchmarks.front [--connections N,N] [--turns N] [--loads N,N] [--latency-turns N] [--rounds N]
                               [--fronts N]

Two servers are compared. One is the Conductor's process with its front, and instances that compute nothing
(`instant_workers`). A request of 1,000 tokens of text is parsed, validated, tokenized, placed and dispatched.
It is answered by 64 tokens, one event every 20 ms. The other server is a bare FastAPI application that
streams the same number of events and does nothing else. wrk loads them in turn (`wrk`), over connections that
stay open. Each connection sends its next request after the answer to the previous one.

Processor time is the time of all threads of the server's process. While it is measured, connections send
their next requests at once.

Latency is measured by wrk, which sees whole answers. While it is measured, connections send their next
requests after a random part of a step, so that requests come at all times of a step. Requests for a single
token are sent at the same time: their whole answer is a first token, which gives the TTFT. Percentiles are of
all rounds together.

With `--fronts N` the load goes to N fronts in processes of their own, and the Conductor's process decides.
Then processor time is the sum over all these processes, and the Conductor's part of it is shown in a column.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.debian import CannotFetchError
from benchmarks.front.fronts import Server, bare, front
from benchmarks.front.load import FIRST_TOKENS_PER_S, Cost, cost, latency
from benchmarks.front.wrk import Wrk, WrkError
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.servers import ServerError

MAX_CPU_MS, MAX_CPU_RATIO = 3.3, 1.12
MAX_ADDED_MS = 20.0
OURS, BARE = "front and Conductor", "bare FastAPI"
_WARM_UP_CONNECTIONS, _WARM_UP_TURNS = 32, 2

S = TypeVar("S")


def in_turn(
    ours: Server, floor: Server, num_rounds: int, measure: Callable[[Server, int], S]
) -> tuple[list[S], list[S]]:
    """Return the samples of both servers, one for each round.

    `measure` is called with a server and the round's number. The servers take turns in beginning a round.
    """
    of_ours: list[S] = []
    of_floor: list[S] = []
    sides = [(of_ours, ours), (of_floor, floor)]
    for number in range(1, num_rounds + 1):
        progress(f"round {number} of {num_rounds}")
        for samples, server in sides if number % 2 else reversed(sides):
            samples.append(measure(server, number))
    return of_ours, of_floor


def print_costs(
    wrk: Wrk, ours: Server, floor: Server, connections: Sequence[int], num_turns: int, num_rounds: int
) -> None:
    """Measure and print the processor time of requests. Raises WrkError."""
    rows = []
    for number in connections:
        progress(f"{number} connections")
        samples = in_turn(ours, floor, num_rounds, partial(cost, wrk, number, num_turns))
        of_ours, of_floor = (Cost(*map(statistics.median, zip(*of_side, strict=True))) for of_side in samples)
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
    wrk: Wrk, ours: Server, floor: Server, connections: Sequence[int], num_turns: int, num_rounds: int
) -> None:
    """Measure and print the latencies of requests. Raises WrkError."""
    rows = []
    for number in connections:
        progress(f"{number} connections, latency")
        samples = in_turn(ours, floor, num_rounds, partial(latency, wrk, number, num_turns))
        times_ms = [
            (
                *_percentiles_ms(sample.ttft_s for sample in of_side),
                *_percentiles_ms(sample.late_s for sample in of_side),
            )
            for of_side in samples
        ]
        for name, of_side, own_ms in zip((OURS, BARE), samples, times_ms, strict=True):
            ttft_p50_ms, ttft_p99_ms, late_p50_ms, late_p99_ms = own_ms
            _, bare_ttft_ms, _, bare_late_ms = times_ms[1]
            shown_ms = [ttft_p50_ms, ttft_p99_ms, ttft_p99_ms - bare_ttft_ms]
            shown_ms += [late_p50_ms, late_p99_ms, late_p99_ms - bare_late_ms]
            rate_per_s = statistics.mean(sample.rate_per_s for sample in of_side)
            rows.append((f"{rate_per_s:.0f}", name, *(f"{time_ms:.1f} ms" for time_ms in shown_ms)))
    print_table(
        "Front: latency",
        (
            "requests/s",
            "",
            "TTFT p50",
            "TTFT p99",
            "beyond bare FastAPI's",
            "answer beyond its steps p50",
            "p99",
            "beyond bare FastAPI's",
        ),
        rows,
        f"Bar: at half the rate that {MAX_CPU_MS} ms allow a core, {500 / MAX_CPU_MS:.0f} requests/s, "
        f"{MAX_ADDED_MS:.0f} ms of added latency at p99. "
        f"{FIRST_TOKENS_PER_S:.0f} requests/s more are for one token.",
    )


def _percentiles_ms(times_s: Iterable[list[float]]) -> tuple[float, float]:
    """Return the 50th and the 99th percentile, in milliseconds, of all rounds together."""
    p50_s, p99_s = np.percentile([time_s for of_round in times_s for time_s in of_round], [50, 99])
    return 1000 * float(p50_s), 1000 * float(p99_s)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--connections", type=_numbers, default="64,192,384", metavar="N,N",
        help="of wrk, for processor time; default: 64,192,384; '': none",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="requests of each; default: 8")
    parser.add_argument(
        "--loads", type=_numbers, default="192", metavar="N,N",
        help="connections, for latency; default: 192, which ask for 150 answers a second; '': none",
    )  # fmt: skip
    parser.add_argument(
        "--latency-turns", type=int, default=12, metavar="N", help="requests of each of these; default: 12"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--fronts", type=int, default=0, metavar="N", help="beside the Conductor's own; default: 0"
    )
    options = parser.parse_args()
    if options.loads and options.latency_turns < 2:
        parser.error(
            "--latency-turns must be 2 or more: first tokens are asked for while all connections are busy"
        )
    try:
        wrk = Wrk()
        with front(num_fronts=options.fronts) as ours, bare() as floor:
            for server in (ours, floor):  # first calls allocate
                cost(wrk, _WARM_UP_CONNECTIONS, _WARM_UP_TURNS, server, 0)
            if options.connections:
                print_costs(wrk, ours, floor, options.connections, options.turns, options.rounds)
            if options.loads:
                print_latencies(wrk, ours, floor, options.loads, options.latency_turns, options.rounds)
    except (ServerError, WrkError, CannotFetchError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
