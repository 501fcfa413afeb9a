"""Our throughput and that of perftest, measured in turns in the same machine.

    python3 -m tests.rdma.guest.bench

The machine is emulated, so the figures only compare the two programs. They say nothing about a real card.
"""

import asyncio
import re
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.rdma.guest.nodes import DEADLINE_S, MIB, node
from tests.rdma.guest.peer import peer_process

NUM_ROUNDS = 15
NUM_TRANSFERS = 60
NUM_AT_ONCE = 16
TRANSFER_BYTES = MIB
PERFTEST_PORT = 18515
TCP_LISTEN = "0A"


def is_listening(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == TCP_LISTEN for row in rows)


def perftest(program: str) -> float:
    """Return the MiB/s between two processes over one connection, measured by `program`."""
    options = ["-F", "-x", "1", "-s", str(TRANSFER_BYTES), "-n", str(NUM_TRANSFERS), "-t", str(NUM_AT_ONCE)]
    server = subprocess.Popen(
        [program, "-d", "rxe1", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not is_listening(PERFTEST_PORT):
        assert server.poll() is None, f"{program} did not start"
    client = subprocess.run(
        [program, "-d", "rxe0", *options, "127.0.0.1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    server.wait(DEADLINE_S)
    row = re.search(rf"^\s*{TRANSFER_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)", client.stdout, re.MULTILINE)
    assert row is not None, client.stdout
    return float(row[1])


async def ours(transfer: Callable[[int], Awaitable[None]]) -> float:
    """Return the MiB/s of single transfers, several of them at the same time."""
    numbers = iter(range(NUM_TRANSFERS))

    async def work() -> None:
        for n in numbers:
            await transfer(n % NUM_AT_ONCE * TRANSFER_BYTES)

    start_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return NUM_TRANSFERS * TRANSFER_BYTES / MIB / (time.perf_counter() - start_s)


async def main() -> None:
    size_bytes = NUM_AT_ONCE * TRANSFER_BYTES
    figures: dict[str, list[float]] = {}
    with node("rxe0", size_bytes) as here:
        async with peer_process(size_bytes) as peer:
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)

            async def write(offset: int) -> None:
                await endpoint.write([(offset, place.address + offset, TRANSFER_BYTES)], place.remote_key)

            async def read(offset: int) -> None:
                await endpoint.read([(offset, place.address + offset, TRANSFER_BYTES)], place.remote_key)

            for _round in range(NUM_ROUNDS):
                for name, transfer in (("write", write), ("read", read)):
                    figures.setdefault(name, []).append(await ours(transfer))
                    figures.setdefault(f"ib_{name}_bw", []).append(perftest(f"ib_{name}_bw"))
            endpoint.close()
    print(f"{TRANSFER_BYTES // MIB} MiB transfers, {NUM_AT_ONCE} at once, MiB/s: median (all rounds)")
    for name, rounds in figures.items():
        print(f"{name:12} {statistics.median(rounds):6.1f}  ({' '.join(f'{each:.0f}' for each in rounds)})")
    for name in ("write", "read"):
        pairs = zip(figures[name], figures[f"ib_{name}_bw"], strict=True)
        ratio = statistics.median(our / their for our, their in pairs)
        print(f"{name} / ib_{name}_bw, median of the rounds: {ratio:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
