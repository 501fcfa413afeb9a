"""Servers of vLLM that share our pool, compared with vLLM alone and with one of vLLM's own connectors.

    python -m benchmarks.vllm_pool [--rounds N] [--peer MooncakeStoreConnector|ExampleConnector|none]
        [--block-size N]

Hits: two servers have the same connector. The first computes a prompt, the second finds all of it but the
last page. Their TTFTs are compared. The peer is a connector that comes with vLLM. MooncakeStoreConnector
shares a Mooncake Store (its package needs libibverbs even without RDMA), ExampleConnector shares files. Cost:
the output tokens a second of a server with a connector and of one without, in turn, with prompts that share
nothing. `--block-size` is the block size of all servers.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.kvstore.mooncake_store import Master, PeerError
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from benchmarks.servers import Server, ServerError, free_port, serving, telling_why
from benchmarks.serving import CONCURRENCIES, Client, closed_loop, our_command, timed
from benchmarks.tools.arguments import count

NUM_PROMPT_TOKENS = 1500
POOL_BYTES = "2GiB"
STORE_S = 0.5
"""Seconds of a pause in which the first server can store its computed blocks."""
PER_CLIENT = 2
"""The requests of each client in a closed loop."""
MOONCAKE_STORE = {
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device_name": "",
    "global_segment_size": POOL_BYTES.removesuffix("iB") + "B",
    "local_buffer_size": "512MB",
}
"""The settings of a Mooncake Store. Each server contributes `global_segment_size` of memory to it."""
HIT_BAR, COST_BAR = 0.25, 0.97


class Side(NamedTuple):
    """A running vLLM server. It is paused except while it is measured."""

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
        """Return the seconds to the first token of an answer to `prompt`."""
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
            return timed(http, body, 2, lambda event: len(event["choices"][0]["token_ids"]))


@contextlib.contextmanager
def pool(folder: Path, log: int) -> Iterator[dict[str, object]]:
    """Start a pool of ours, and yield the settings of a connector to it."""
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


@contextlib.contextmanager
def peer(name: str, engine: VllmCpu, folder: Path) -> Iterator[tuple[dict[str, object], dict[str, str]]]:
    """Start the processes that one of vLLM's own connectors needs.

    Yields the connector's settings, and changes of the environment variables.
    """
    if name == "MooncakeStoreConnector":
        package = engine.mooncake_store()
        with contextlib.closing(Master(package / "mooncake" / "mooncake_master")) as master:
            config = folder / "mooncake.json"
            config.write_text(json.dumps(MOONCAKE_STORE | {"master_server_address": master.address}))
            environment = {
                "PYTHONPATH": str(package),
                "MOONCAKE_CONFIG_PATH": str(config),
                "PYTHONHASHSEED": "0",
            }
            yield {"kv_connector": name}, environment
    else:
        yield {"kv_connector": name, "kv_connector_extra_config": {"shared_storage_path": str(folder)}}, {}


@contextlib.contextmanager
def vllm(
    vllm: VllmCpu,
    connector: dict[str, object] | None,
    log: int,
    block_size: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Side]:
    """Start a server of vLLM with this connector, or without one, and yield it paused.

    `environment`: changes of the environment variables that our connector needs.
    """
    port = free_port()
    options = ["--block-size", str(block_size)]
    if connector is not None:
        options += ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **connector})]
    url = f"http://127.0.0.1:{port}"
    command = vllm.serve_command(port, *options)
    with (
        serving(
            command, f"{url}/health", vllm.connector_environment | dict(environment or {}), log
        ) as server,
        contextlib.closing(vllm.client(url)) as client,
    ):
        client.complete(64, 4)  # first calls allocate
        server.pause()
        try:
            yield Side(server, client, url)
        finally:
            server.resume()


def measure_hits(name: str, sides: list[Side], rounds: int) -> list[str]:
    """Measure the TTFTs of both servers for the same prompts. Returns a row of the table."""
    draw = random.Random(name)
    first, second = sides
    computed_s, found_s = [], []
    for number in range(rounds + 1):
        prompt = [draw.randrange(1000, 40000) for _ in range(NUM_PROMPT_TOKENS)]
        computed_in_s = first.ttft_s(prompt)
        with first.awake():
            time.sleep(STORE_S)
        times = computed_in_s, second.ttft_s(prompt)
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


def measure_cost(name: str, connected: Side, plain: Side, rounds: int) -> Iterator[list[str]]:
    """Measure the tokens a second with and without a connector, in turn. Yields the rows of the table."""
    for concurrency in CONCURRENCIES:
        rates: dict[str, list[float]] = {"connected": [], "plain": []}
        for number in range(rounds):
            sides = [("connected", connected), ("plain", plain)]
            for kind, side in sides if number % 2 else reversed(sides):
                with side.awake() as client:
                    client.complete(16, 2)
                    rates[kind].append(closed_loop(client, concurrency, PER_CLIENT * max(concurrency, 4))[0])
        ratios = [a / b for a, b in zip(rates["connected"], rates["plain"], strict=True)]
        with_it, without = statistics.median(rates["connected"]), statistics.median(rates["plain"])
        progress(f"{name}, {concurrency} clients: {[f'{ratio:.3f}' for ratio in ratios]}")
        yield [
            *(name, str(concurrency), f"{with_it:.0f}", f"{without:.0f}"),
            *(f"{statistics.median(ratios):.3f}", f"{COST_BAR}"),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--peer", default="MooncakeStoreConnector")
    parser.add_argument("--block-size", type=count, default=128, metavar="N")
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
        plain = stack.enter_context(vllm(engine, None, log, arguments.block_size))
        hits: list[list[str]] = []
        costs: list[list[str]] = []

        def measure(name: str, settings: dict[str, object], environment: Mapping[str, str]) -> None:
            options = (engine, settings, log, arguments.block_size, environment)
            with vllm(*options) as first:
                with vllm(*options) as second:
                    hits.append(measure_hits(name, [first, second], arguments.rounds))
                costs.extend(measure_cost(name, first, plain, arguments.rounds))

        measure("ours", ours, {})
        if arguments.peer != "none":
            (folder / "peer").mkdir()
            with peer(arguments.peer, engine, folder / "peer") as (settings, environment):
                measure(arguments.peer, settings, environment)
        print_table(
            "A prefix of 1,500 tokens",
            ("connector", "computed, TTFT p50", "found, TTFT p50", "ratio", "bar"),
            hits,
        )
        print_table(
            "Nothing shared",
            ("connector", "clients", "with it, tok/s", "without, tok/s", "ratio", "bar"),
            costs,
        )


if __name__ == "__main__":
    main()
