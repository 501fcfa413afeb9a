"""Compare ways to divide two cores among prompts and answers, in turns.

    python -m benchmarks.coupling [--rounds N] [--sides NAME,...] [--loads NAME,...] [mooncake-serve flags]

The sides are clusters of `mooncake-serve` on this machine, which have the processor one at a time:

    fixed     one prefill and one decode instance, all KVCache is transferred
    chosen    the same, and the Conductor chooses for each request (`conductor.inlining`)
    both      one instance with both roles
    both x 2  two of them

Loads are closed loops of clients that each send random prompts. TBT is the time between two tokens.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import httpx

from benchmarks.isolation import percentile
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.servers import Server, ServerError, free_port, serving, telling_why
from benchmarks.serving import our_command
from benchmarks.tools.arguments import count

SIDES = {
    "fixed": ("--conductor-inlining", "false"),
    "chosen": ("--conductor-inlining", "true"),
    "both": ("--num-both", "1"),
    "both x 2": ("--num-both", "2"),
}
MEMORY = ("--kvcache-pool-bytes", "512MiB", "--kvcache-device-bytes", "512MiB")
"""of each instance: all sides together must fit"""


class Load(NamedTuple):
    """A closed loop: of each ten requests so many are long, all others short."""

    num_clients: int
    num_long: int
    num_requests: int


LOADS = {
    "1 client": Load(1, 0, 8),
    "8 clients": Load(8, 0, 32),
    "32 clients": Load(32, 0, 96),
    "8 clients 20% long": Load(8, 2, 30),
    "4 clients all long": Load(4, 10, 12),
}
SHORT, LONG = (128, 64), (1500, 16)
"""Tokens of prompt and answer."""


class Sample(NamedTuple):
    """One turn of one side."""

    tokens_per_s: float
    ttfts_s: list[float]
    gaps_s: list[float]


class Side(NamedTuple):
    """A running cluster."""

    name: str
    server: Server
    url: str
    model: str


async def _complete(
    http: httpx.AsyncClient, side: Side, rng: random.Random, size: tuple[int, int]
) -> list[float]:
    """Return the moments of the request and of its tokens."""
    num_prompt, num_answer = size
    body = {
        "model": side.model,
        "prompt": [rng.randrange(1000, 40000) for _ in range(num_prompt)],
        "max_tokens": num_answer,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    moments_s = [time.perf_counter()]
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                num_tokens = len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                moments_s += [time.perf_counter()] * num_tokens
    if len(moments_s) != 1 + num_answer:
        raise RuntimeError(f"{side.name}: expected {num_answer} tokens, got {len(moments_s) - 1}")
    return moments_s


async def _measure(side: Side, load: Load, seed: int) -> Sample:
    rng = random.Random(seed)
    left = [LONG if number % 10 < load.num_long else SHORT for number in range(load.num_requests)]
    rng.shuffle(left)
    requests: list[list[float]] = []
    begun_s = time.perf_counter()
    limits = httpx.Limits(max_connections=load.num_clients)
    async with httpx.AsyncClient(base_url=side.url, timeout=300, limits=limits) as http:

        async def client() -> None:
            while left:
                requests.append(await _complete(http, side, rng, left.pop()))

        await asyncio.gather(*(client() for _ in range(load.num_clients)))
    seconds = time.perf_counter() - begun_s
    gaps_s = [b - a for moments in requests for a, b in itertools.pairwise(moments[1:])]
    ttfts_s = [moments[1] - moments[0] for moments in requests]
    return Sample(sum(len(moments) - 1 for moments in requests) / seconds, ttfts_s, gaps_s)


@contextlib.contextmanager
def _started(names: Sequence[str], flags: Sequence[str], output: int) -> Iterator[list[Side]]:
    with contextlib.ExitStack() as stack:
        sides = []
        for name in names:
            progress(f"starting {name}")
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = our_command(port, [*MEMORY, *SIDES[name], *flags])
            server = stack.enter_context(serving(command, f"{url}/ready", output=output))
            model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
            side = Side(name, server, url, model)
            asyncio.run(_measure(side, Load(4, 1, 10), seed=0))  # costs are learned, memory is touched
            server.pause()
            stack.callback(server.resume)
            sides.append(side)
        yield sides


def compare(sides: Sequence[Side], loads: Sequence[str], num_rounds: int) -> None:
    """Print a table for each load."""
    for name in loads:
        samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
        for number in range(num_rounds):
            progress(f"{name}: round {number + 1} of {num_rounds}")
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.server.resume()
                asyncio.run(_measure(side, Load(1, 0, 1), seed=1000 + number))  # heartbeats go on
                samples[side.name].append(asyncio.run(_measure(side, LOADS[name], seed=number + 1)))
                side.server.pause()
        print_table(
            name,
            ("", "output tok/s", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99"),
            [(side, *_cells(of_side)) for side, of_side in samples.items()],
            f"{LOADS[name].num_requests} requests a round. Short ones have {SHORT[0]} tokens in and"
            f" {SHORT[1]} out, long ones {LONG[0]} and {LONG[1]}. Medians over {num_rounds} rounds.",
        )


def _cells(samples: Sequence[Sample]) -> list[str]:
    rate = statistics.median(sample.tokens_per_s for sample in samples)
    times = [
        statistics.median(percentile(values, share) for values in each)
        for each in ([sample.ttfts_s for sample in samples], [sample.gaps_s for sample in samples])
        for share in (0.5, 0.99)
    ]
    return [f"{rate:.0f}", *(f"{1000 * seconds:.0f} ms" for seconds in times)]


def main() -> None:
    """Start the sides, measure in turns, end them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coupling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=count, default=3, metavar="N")
    parser.add_argument("--sides", default=",".join(SIDES), metavar="NAME,...", help="default: all")
    parser.add_argument("--loads", default=",".join(LOADS), metavar="NAME,...", help="default: all")
    arguments, flags = parser.parse_known_args()
    names, loads = _known(parser, arguments.sides, SIDES), _known(parser, arguments.loads, LOADS)
    with telling_why(ServerError) as output, _started(names, flags, output) as sides:
        compare(sides, loads, arguments.rounds)


def _known(parser: argparse.ArgumentParser, text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
