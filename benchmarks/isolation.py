"""Measure a tenant's small requests on an idle server, and beside another tenant's large requests.

    python -m benchmarks.isolation [--rounds N] [--only NAME ...] [mooncake-serve flags]

The benchmark starts `mooncake-serve` on a free port, by default with one instance for both phases, and with
an API key for each of two tenants. The large tenant keeps sending a load that any client is allowed to send.
The small tenant asks again and again for two tokens after a prompt of 16 random tokens, with a user's pauses.
Each load is one row; the first row is the idle server. `times idle` is the p99 of TTFT divided by that of the
idle server. `gap` is the p50 of the time between the two tokens.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.servers import ServerError, free_port, serving, telling_why
from benchmarks.tools.arguments import count
from mooncake.security.api_keys import add_api_key

Body = dict[str, Any]
MODEL = "m"
NUM_ROUNDS = 100
PAUSE_S = 0.1
"""The mean pause in seconds between two small requests."""
SETTLING_S = 3.0
"""Seconds of a load before the small requests begin. The burst at the load's beginning has its own row."""
NUM_PROMPT, NUM_LONG_PROMPT = 16, 7000
"""The tokens in the prompt of a small request, and in a long prompt."""
FLOOD = 64
"""The requests that a load of many requests keeps in flight."""


async def whole(http: httpx.AsyncClient, path: str, bodies: Iterator[Body]) -> int:
    """Send a request and read its answer, streamed or not, as bytes. Returns the answer's status."""
    async with http.stream("POST", path, json=next(bodies)) as answer:
        async for _ in answer.aiter_raw():
            pass
    return answer.status_code


async def pipelined(http: httpx.AsyncClient, path: str, bodies: Iterator[Body]) -> int:
    """Send requests over one connection, without waiting for answers to earlier ones.

    Returns the last answer's status.
    """
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    with contextlib.closing(writer):
        writer.write(b"".join(in_bytes(http, path, body) for body in itertools.islice(bodies, FLOOD)))
        for _ in range(FLOOD):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    return int(head.split()[1])


async def dropped(http: httpx.AsyncClient, path: str, bodies: Iterator[Body]) -> int:
    """Send a request, and close the connection without waiting for the answer. Returns 200."""
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    with contextlib.closing(writer):
        writer.write(in_bytes(http, path, next(bodies)))
        await writer.drain()
    return 200


def in_bytes(http: httpx.AsyncClient, path: str, body: Body) -> bytes:
    """Return a request as it is sent over a connection of HTTP/1.1."""
    request = http.build_request("POST", path, json=body)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + request.content


class Load(NamedTuple):
    """Requests of the large tenant. Each one is sent again when it has ended."""

    name: str
    path: str
    body: Callable[[random.Random], Body]
    num_clients: int = 1
    settles: bool = True
    send: Callable[[httpx.AsyncClient, str, Iterator[Body]], Awaitable[int]] = whole


class Measured(NamedTuple):
    """Measured seconds of small requests: TTFTs, times of whole answers, gaps between tokens."""

    ttfts_s: list[float]
    answers_s: list[float]
    gaps_s: list[float]


def completion(rng: random.Random, num_prompt: int, num_tokens: int, **fields: Any) -> Body:
    """Return the body of a request with `num_prompt` random tokens that asks for `num_tokens` tokens."""
    prompt = [rng.randrange(1000, 40000) for _ in range(num_prompt)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **fields}


def chat(content: str, num_tokens: int, **fields: Any) -> Body:
    """Return the body of a request for `num_tokens` tokens behind a chat of one message."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": num_tokens, **fields}


def of_any_kind(rng: random.Random) -> Body:
    """Return the body of a request with a short or long prompt, one answer or several, streamed or not."""
    num_prompt, num_tokens = rng.choice((16, 500, NUM_LONG_PROMPT)), rng.choice((1, 64, 1000))
    return completion(rng, num_prompt, num_tokens, n=rng.choice((1, 1, 1, 8)), stream=rng.random() < 0.5)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOADS = (
    Load("idle", "", lambda _: {}, num_clients=0),
    Load("n=128 of 2,000 tokens", COMPLETIONS, lambda rng: completion(rng, 16, 2000, n=128)),
    Load("n=128, streamed", COMPLETIONS, lambda rng: completion(rng, 16, 2000, n=128, stream=True)),
    Load("its first second", COMPLETIONS, lambda rng: completion(rng, 16, 2000, n=128), settles=False),
    Load("n=128, logprobs=5", COMPLETIONS, lambda rng: completion(rng, 16, 2000, n=128, logprobs=5)),
    Load("n=128, long prompt", COMPLETIONS, lambda rng: completion(rng, NUM_LONG_PROMPT, 400, n=128)),
    Load("64 of 2,000 tokens", COMPLETIONS, lambda rng: completion(rng, 16, 2000), FLOOD),
    Load("64 long prompts", COMPLETIONS, lambda rng: completion(rng, NUM_LONG_PROMPT, 1), FLOOD),
    Load("64 of n=128", COMPLETIONS, lambda rng: completion(rng, 16, 1, n=128), FLOOD),
    Load("64 short ones", COMPLETIONS, lambda rng: completion(rng, 16, 1), FLOOD),
    Load("64 short ones, pipelined", COMPLETIONS, lambda rng: completion(rng, 16, 1), send=pipelined),
    Load("64 short ones, dropped", COMPLETIONS, lambda rng: completion(rng, 16, 1), FLOOD, send=dropped),
    Load(
        "64 template variables",
        CHAT,
        lambda rng: chat("Say x.", 1, chat_template_kwargs={"x": words(rng, 4)}),
        FLOOD,
    ),
    Load("64 of any kind", COMPLETIONS, of_any_kind, FLOOD),
    Load(
        "64 large /tokenize", "/tokenize", lambda rng: {"model": MODEL, "prompt": words(rng, 20_000)}, FLOOD
    ),
    Load(
        "64 schemas of 2,000 values",
        CHAT,
        lambda rng: chat("Say x.", 64, response_format=enum_of(rng, 2000)),
        FLOOD,
    ),
)


def words(rng: random.Random, num_words: int) -> str:
    """Return random words. In practice no word is repeated."""
    return " ".join(f"{rng.randrange(1 << 40):x}" for _ in range(num_words))


def enum_of(rng: random.Random, num_values: int) -> Body:
    """Return a response format that the server has not seen before."""
    schema = {
        "type": "object",
        "properties": {"x": {"enum": words(rng, num_values).split()}},
        "required": ["x"],
    }
    return {"type": "json_schema", "json_schema": {"name": "values", "schema": schema}}


async def keep_asking(http: httpx.AsyncClient, load: Load, rng: random.Random, statuses: set[int]) -> None:
    """Send requests of a load until cancelled."""
    bodies = (load.body(rng) for _ in itertools.count())
    while True:
        status = await load.send(http, load.path, bodies)
        statuses.add(status)
        if status != 200:
            await asyncio.sleep(0.2)


def client(url: str, key: str) -> httpx.AsyncClient:
    """Return the HTTP client of a tenant."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=600,
        headers={"Authorization": f"Bearer {key}"},
        limits=httpx.Limits(max_connections=2 * FLOOD),
    )


async def send_until_told(url: str, key: str, load: Load, seed: int, end: Connection) -> None:
    """Send a load until a message arrives over `end`, the connection with the measuring process.

    That process gets a message when the load has begun and, at the end, the set of the answers' statuses and
    the errors of clients that have ended early.
    """
    statuses = set[int]()
    async with client(url, key) as http:
        tasks = [
            asyncio.create_task(keep_asking(http, load, random.Random(1000 * seed + number), statuses))
            for number in range(load.num_clients)
        ]
        end.send("begun")
        await asyncio.to_thread(end.recv)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    end.send((statuses, [repr(error) for error in ended if isinstance(error, Exception)]))


def run_load(url: str, key: str, name: str, seed: int, end: Connection) -> None:
    """Send a load until a message arrives over `end`. This is the main function of the load's process."""
    [load] = [load for load in LOADS if load.name == name]
    with contextlib.suppress(EOFError, ConnectionError):  # the measuring process has ended early
        asyncio.run(send_until_told(url, key, load, seed, end))


@contextlib.contextmanager
def _telling_of_early_end(load: Load) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise ServerError(f"the process that sends the load {load.name!r} has ended early") from None


@contextlib.contextmanager
def under_way(url: str, key: str, load: Load, seed: int) -> Iterator[None]:
    """Make a context in which the load is sent, by a process of its own.

    In the process that measures, the load's clients would delay the small tenant's client.
    """
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=run_load, args=(url, key, load.name, seed, theirs))
    process.start()
    theirs.close()
    try:
        with _telling_of_early_end(load):
            ours.recv()  # it has begun
        yield
        with _telling_of_early_end(load):
            ours.send("end")
            statuses, errors = ours.recv()
    finally:
        ours.close()
        process.join()
    if errors:
        print(f"{load.name}: {len(errors)} clients have ended early: {errors[0]}", file=sys.stderr)
    if statuses - {200}:
        print(f"{load.name}: answered {sorted(statuses)}", file=sys.stderr)


async def small_request(http: httpx.AsyncClient, rng: random.Random) -> tuple[float, float, float]:
    """Send a small request.

    Returns the seconds to its first token, the seconds to its end, and the gap between its two tokens.
    """
    body = completion(rng, NUM_PROMPT, 2, stream=True)
    started_s, seen_s = time.perf_counter(), list[float]()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ServerError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith('data: {"'):
                seen_s.append(time.perf_counter())
    return seen_s[0] - started_s, seen_s[-1] - started_s, seen_s[-1] - seen_s[0]


async def beside(small: httpx.AsyncClient, key: str, load: Load, num_rounds: int) -> Measured:
    """Measure the small tenant's requests beside `load`, which is sent with `key`.

    If a load does not settle, a fifth of `num_rounds` small requests are measured, and the load begins anew
    for each.
    """
    rng, url = random.Random(load.name), str(small.base_url)
    rows = []
    if load.settles:
        with under_way(url, key, load, 0):
            await asyncio.sleep(SETTLING_S if load.num_clients else 0.0)
            for _ in range(num_rounds):
                await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
                rows.append(await small_request(small, rng))
    else:
        for seed in range(-(-num_rounds // 5)):
            with under_way(url, key, load, seed):
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                rows.append(await small_request(small, rng))
            await idle(small)
    await idle(small)
    return Measured(*(list(column) for column in zip(*rows, strict=True)))


async def idle(http: httpx.AsyncClient) -> None:
    """Wait until no request is in flight at the server."""
    while True:
        lines = (await http.get("/metrics")).text.splitlines()
        states = [float(line.split()[-1]) for line in lines if line.startswith("mooncake_requests_by_state{")]
        if not sum(states):
            return
        await asyncio.sleep(0.05)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that at least `share` of all values are no larger."""
    return sorted(values)[max(0, -(-int(len(values) * share * 1000) // 1000) - 1)]


async def measure(url: str, keys: Sequence[str], loads: Sequence[Load], num_rounds: int) -> None:
    """Measure all loads, and print one table. A row is printed as soon as it is known."""
    small_key, large_key = keys
    async with client(url, small_key) as small:
        for _ in range(5):
            await small_request(small, random.Random(0))  # first calls allocate
        print("| beside | TTFT p50 | p99 | most | times idle | whole answer p50 | p99 | gap |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        idle_s = None
        for load in loads:
            measured = await beside(small, large_key, load, num_rounds)
            p99_s = percentile(measured.ttfts_s, 0.99)
            idle_s = idle_s or p99_s
            cells = [statistics.median(measured.ttfts_s), p99_s, max(measured.ttfts_s)]
            times = [f"{1000 * cell:.0f} ms" for cell in cells] + [f"{p99_s / idle_s:.1f}"]
            cells = [statistics.median(measured.answers_s), percentile(measured.answers_s, 0.99)]
            cells.append(statistics.median(measured.gaps_s))
            times += [f"{1000 * cell:.0f} ms" for cell in cells]
            print(f"| {load.name} | {' | '.join(times)} |", flush=True)


def main() -> None:
    """Start a server, measure it, and end it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.isolation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, default=NUM_ROUNDS, metavar="N")
    parser.add_argument("--only", action="append", choices=[load.name for load in LOADS[1:]])
    arguments, flags = parser.parse_known_args()
    loads = [
        load for load in LOADS if load is LOADS[0] or arguments.only is None or load.name in arguments.only
    ]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with telling_why(ServerError) as log, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        keys = [add_api_key(file, name, {}) for name in ("small", "large")]
        command = [sys.executable, "-m", "mooncake", f"--port={port}", f"--http-api-keys-file={file}"]
        command += [f"--served-model-name={MODEL}", *flags]
        with serving(command, f"{url}/ready", output=log):
            asyncio.run(measure(url, keys, loads, arguments.rounds))


if __name__ == "__main__":
    main()
