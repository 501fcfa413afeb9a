"""The TTFT and output throughput of a whole local cluster, through HTTP.

  python -m benchmarks.serving [mooncake-serve flags]

The benchmark starts `mooncake-serve --role all` on a free port with the given flags, by default with one
prefill and one decode instance. It measures single requests and a closed loop, and prints two tables. Prompts
are random tokens, different for each request, so nothing is cached.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx

from benchmarks.report import Report
from benchmarks.servers import ServerError, free_port, serving

PAIR = ("--num-prefill=1", "--num-decode=1")
"""The flags of a server with one prefill and one decode instance."""
NUM_ROUNDS = 5
PROMPT_LENS = (16, 128, 512, 1024, 2048, 4096)
CONCURRENCIES = (1, 8, 32)
NUM_INPUT, NUM_OUTPUT = 128, 64
"""The tokens of a prompt and of an answer in the closed loop."""


class Completes(Protocol):
    """The interface of a client that sends completions with random prompts."""

    def complete(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Stream one answer, and return its TTFT in seconds."""

    def close(self) -> None: ...


class Client:
    """A client that sends completions with random prompts as token ids."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=64))
        self._model = self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._rng = random.Random(0)

    def close(self) -> None:
        self._http.close()

    def complete(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Stream one answer, and return its TTFT in seconds."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(1000, 40000) for _ in range(num_prompt_tokens)],
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        return timed(self._http, body, num_output_tokens, lambda event: len(event["choices"][0]["token_ids"]))


def timed(
    http: httpx.Client, body: object, num_output_tokens: int, num_tokens_of: Callable[[Any], int]
) -> float:
    """Send a completion, read its stream, and return its TTFT in seconds.

    `num_tokens_of` returns the number of tokens that an event has or reports. Raises RuntimeError if the sum
    over all events is not `num_output_tokens`.
    """
    started_s = time.perf_counter()
    ttft_s = None
    num_tokens = 0
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.perf_counter() - started_s
                num_tokens += num_tokens_of(json.loads(line.removeprefix("data: ")))
    if num_tokens != num_output_tokens or ttft_s is None:
        raise RuntimeError(f"expected {num_output_tokens} tokens, got {num_tokens}")
    return ttft_s


def closed_loop(client: Completes, concurrency: int, num_requests: int) -> tuple[float, list[float]]:
    """Send requests with `concurrency` of them in flight.

    Returns the output tokens a second, and the TTFTs of all requests in seconds.
    """
    started_s = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        ttfts_s = list(threads.map(lambda _: client.complete(NUM_INPUT, NUM_OUTPUT), range(num_requests)))
    return NUM_OUTPUT * num_requests / (time.perf_counter() - started_s), ttfts_s


def our_command(port: int, flags: Sequence[str]) -> list[str]:
    """Return the command that starts our server on this port with these flags."""
    return [sys.executable, "-m", "mooncake", "--port", str(port), *flags]


def paired(flags: Sequence[str]) -> list[str]:
    """Return flags of a server that is a pair, unless `flags` name a role or numbers of instances."""
    names_instances = any(flag.startswith(("--role", "--num-")) for flag in flags)
    return [*(() if names_instances else PAIR), *flags]


def measure(client: Client, report: Report) -> None:
    """Measure single requests and the closed loop, and add a table for each."""
    client.complete(64, 4)  # first calls allocate
    report.table("One request at a time", "prompt tokens", "TTFT p50", "prefill tok/s")
    for num_prompt_tokens in PROMPT_LENS:
        ttft_s = statistics.median(client.complete(num_prompt_tokens, 2) for _ in range(NUM_ROUNDS))
        cells = str(num_prompt_tokens), f"{1000 * ttft_s:.0f} ms", f"{num_prompt_tokens / ttft_s:.0f}"
        report.row(*cells, num_prompt_tokens=num_prompt_tokens, ttft_s=ttft_s)
    report.table(
        f"Requests of {NUM_INPUT} tokens, answers of {NUM_OUTPUT}", "in flight", "output tok/s", "TTFT p50"
    )
    for concurrency in CONCURRENCIES:
        rate, ttfts_s = closed_loop(client, concurrency, 3 * concurrency)
        ttft_s = statistics.median(ttfts_s)
        cells = str(concurrency), f"{rate:.0f}", f"{1000 * ttft_s:.0f} ms"
        report.row(*cells, concurrency=concurrency, output_tokens_per_s=rate, ttft_s=ttft_s)


def main() -> None:
    """Start a cluster, measure it, and end it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        with serving(our_command(port, paired(sys.argv[1:])), f"{url}/ready"):
            measure(Client(url), Report())
    except ServerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
