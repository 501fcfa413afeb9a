"""A new Conductor after the loss of the old one: seconds until it places requests and has its whole index.

    python -m benchmarks.conductor.takeover [--instances N] [--blocks N] [--processes N]

The instances are simulated: each has the connection of a worker and the KV events of a messenger, but no
weights or blocks. Half of them prefill, half decode. The Conductor is a real process with its own front. The
measurement begins when the Conductor answers `/health`. From then on a request is sent, and sent again
whenever it is refused. It counts as placed when a decode instance gets the order to reserve pages.

Owns: the simulated instances, the measurement. Does not know: how a Conductor takes over.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.kvstore.index import resident_bytes
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.servers import ServerError, free_port, serving, telling_why
from benchmarks.serving import our_command
from benchmarks.tools.arguments import count
from kvstore.events.batches import EventLog
from kvstore.events.internal import InternalPublisher
from mooncake.bus.zeromq import Dealer, peer_identity
from mooncake.messages.blocks import KEY_BYTES, BlockKey, KVLayout
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.pools import Capacity, MessengerAddress, PoolShard, Tier
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    HeartbeatAck,
    Register,
    Registered,
    Reserve,
    Role,
    ToWorker,
)
from mooncake.model.checkpoint import DEFAULT_MODEL_NAME, kv_layout, open_checkpoint
from mooncake.security.keys import ClusterKey

BLOCK_SIZE = 32
BEAT_S = 2.0
PLACING_BAR_S, WHOLE_BAR_S = 3.0, 30.0
_DEADLINE_S = 120.0


class Cluster(NamedTuple):
    """The settings that all simulated instances share."""

    endpoint: str
    """The Conductor's endpoint."""
    key: str
    fingerprint: str
    layout: KVLayout
    num_blocks: int
    """The number of blocks of each instance."""
    folder: str


class Instance:
    """A simulated instance. It registers again and again until a Conductor accepts it."""

    def __init__(self, number: int, cluster: Cluster, said: "Queue[str]") -> None:
        self._name, self._cluster, self._said = f"i{number}", cluster, said
        self._role = Role.DECODE if number % 2 else Role.PREFILL
        self._number = number
        key = ClusterKey.from_text(cluster.key)
        self._publisher = InternalPublisher(
            EventLog(20),
            self._snapshot,
            instance=self._name,
            incarnation=1,
            endpoint=f"ipc://{cluster.folder}/{self._name}-events",
            request_endpoint=f"ipc://{cluster.folder}/{self._name}-requests",
            key=key,
        )
        identity = peer_identity(self._name, 1)
        self._conductor: Dealer[ToWorker] = Dealer(cluster.endpoint, identity, ToWorker, key)
        self._is_registered = False

    def _snapshot(self) -> Iterator[tuple[Tier, list[BlockKey]]]:
        yield Tier.DRAM, list(_keys(self._number, self._cluster.num_blocks))

    async def run(self) -> None:
        """Register, send heartbeats, and report the order to reserve pages. Never ends."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._hear())
            while True:
                await self._conductor.send(
                    Heartbeat(0, 0, 1_000_000, {}) if self._is_registered else self._registration()
                )
                await asyncio.sleep(BEAT_S)

    def _registration(self) -> Register:
        cluster = self._cluster
        endpoints = self._publisher.endpoint, self._publisher.request_endpoint
        address = MessengerAddress(self._name, 1, "elsewhere", "", (("127.0.0.1", 1),), endpoints)
        return Register(
            PROTOCOL_VERSION,
            self._name,
            1,
            self._role,
            cluster.fingerprint,
            cluster.layout,
            (PoolShard(address, cluster.layout),),
            Capacity(1_000_000, 1_000_000, 256),
            "simulated",
        )

    async def _hear(self) -> None:
        while True:
            message = await self._conductor.recv()
            match message:
                case Registered():
                    self._is_registered = True
                case HeartbeatAck(known=False):
                    self._is_registered = False
                case Reserve():
                    self._said.put("placed")


def _keys(number: int, num_blocks: int) -> Iterator[BlockKey]:
    """Return keys that no other instance has."""
    seed = hashlib.sha256(b"%d" % number).digest()[: KEY_BYTES - 4]
    return (seed + block.to_bytes(4, "little") for block in range(num_blocks))


def simulate(numbers: range, cluster: Cluster, said: "Queue[str]") -> None:
    """Run the simulated instances with these numbers until the process is killed.

    `said` gets the word `there` when all of them run.
    """

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(Instance(number, cluster, said).run())
            await asyncio.sleep(0)
            said.put("there")

    asyncio.run(run())


def await_words(said: "Queue[str]", word: str, times: int) -> None:
    """Wait until `word` has come `times` times from simulated instances.

    Raises ServerError if that takes more than `_DEADLINE_S` seconds.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    while times:
        try:
            times -= said.get(timeout=max(0, deadline_s - time.monotonic())) == word
        except queue.Empty:
            raise ServerError(f"no {word!r} within {_DEADLINE_S:.0f} s") from None


def ask_until(is_over: threading.Event, url: str) -> None:
    """Send a request, and repeat it while it is answered with 503 (no instance) or 429 (too busy)."""
    body = {"model": DEFAULT_MODEL_NAME, "prompt": [*range(100, 100 + 8 * BLOCK_SIZE)], "max_tokens": 4}
    while not is_over.is_set():
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_DEADLINE_S)
        except httpx.HTTPError:
            return  # the Conductor has been ended
        assert answer.status_code in (429, 503), answer.text
        is_over.wait(0.02)


def sample(url: str, name: str) -> float:
    """Return the value of the Conductor's metric `name`, which must have no labels."""
    [value] = re.findall(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics", timeout=60).text, re.MULTILINE)
    return float(value)


def measure(cluster: Cluster, arguments: argparse.Namespace, key_file: Path, log: int) -> list[str]:
    """Measure one takeover, and return the row of the table."""
    context = multiprocessing.get_context("spawn")
    said: Queue[str] = context.Queue()
    num_processes = arguments.processes
    processes = [
        context.Process(
            target=simulate,
            args=(range(first, arguments.instances, num_processes), cluster, said),
            daemon=True,
        )
        for first in range(num_processes)
    ]
    for process in processes:
        process.start()
    port, is_over = free_port(), threading.Event()
    url = f"http://127.0.0.1:{port}"
    flags = [
        *("--role", "conductor", "--security-key-file", str(key_file)),
        *("--conductor-endpoint", cluster.endpoint, "--kvcache-block-size", str(BLOCK_SIZE)),
        *("--conductor-reply-endpoint", f"ipc://{cluster.folder}/replies"),
        *("--conductor-state-file", f"{cluster.folder}/state"),
    ]
    try:
        await_words(said, "there", num_processes)
        progress(f"{arguments.instances} instances wait for a conductor")
        with serving(our_command(port, flags), f"{url}/health", output=log) as server:
            begun_s = time.monotonic()
            asking = threading.Thread(target=ask_until, args=(is_over, url), daemon=True)
            asking.start()
            await_words(said, "placed", 1)
            placed_s = time.monotonic() - begun_s
            progress(f"the first request is placed after {placed_s:.2f} s")
            wanted = arguments.instances * cluster.num_blocks
            while (held := sample(url, "mooncake_index_keys")) < wanted:
                progress(f"{held / 1e6:.1f}M of {wanted / 1e6:.1f}M blocks are in the index")
                if time.monotonic() > begun_s + _DEADLINE_S:
                    raise ServerError(f"the index has {held:.0f} of {wanted} blocks")
                time.sleep(0.25)
            whole_s = time.monotonic() - begun_s
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            memory_bytes = max(resident_bytes(int(child)) for child in children)
            is_over.set()
    finally:
        for process in processes:
            process.kill()
    return [
        f"{arguments.instances}",
        f"{wanted:,}",
        f"{placed_s:.2f} s ({PLACING_BAR_S:.0f})",
        f"{whole_s:.1f} s ({WHOLE_BAR_S:.0f})",
        f"{memory_bytes / 2**20:.0f} MiB",
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conductor.takeover")
    parser.add_argument("--instances", type=count, default=1000)
    parser.add_argument("--blocks", type=count, default=10_000_000, help="of all instances together")
    parser.add_argument("--processes", type=count, default=4, help="that simulate the instances")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(None)
    with telling_why(ServerError) as log, tempfile.TemporaryDirectory(prefix="mc-") as folder:
        key = ClusterKey.generate()
        key_file = Path(folder) / "cluster.key"
        key.save(key_file)
        cluster = Cluster(
            f"ipc://{folder}/conductor",
            key.to_text(),
            checkpoint.fingerprint("bfloat16", BLOCK_SIZE),
            kv_layout(checkpoint, BLOCK_SIZE, "bfloat16"),
            arguments.blocks // arguments.instances,
            folder,
        )
        row = measure(cluster, arguments, key_file, log)
    print_table(
        "A new Conductor (bars in brackets)",
        ("instances", "blocks", "first request placed", "index whole", "Conductor's memory"),
        [row],
    )


if __name__ == "__main__":
    main()
