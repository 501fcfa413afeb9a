"""A decode instance short of memory, alone and with layers or KV heads at a helper (BanaServe, section 4.1).

    python -m benchmarks.migration.short [--layers START:STOP | --heads N] [--seconds N] [--two-hosts]

There are two instances with the default model, and a core for each. Clients send requests to the first
instance, each client one at a time. The instance's KVCache has room for 60% of the tokens that all these
requests have on average. In every other round modules of the first instance are at the second one.
Limit (*bar*): in these rounds at least 1.5 times as many requests a second meet their SLOs.

Owns: the load, the rounds, the table. Does not know: how modules move.
"""

import argparse
import asyncio
import statistics
import sys
import time
from typing import NamedTuple

import torch

from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.migration.modules import percentile
from benchmarks.migration.rig import NAMES, Instance, Rig, rig
from benchmarks.servers import heeding_sigterm
from benchmarks.tools.arguments import count
from mooncake.messages.migration import LayerRange, ModulesPart

NUM_CLIENTS, PROMPT, OUTPUT = 48, 64, 192
NUM_TOKENS = NUM_CLIENTS * (PROMPT + OUTPUT // 2)
"""The mean number of tokens of all requests together."""
SHARE, LEAST_RATIO = 0.6, 1.5
TOKEN_BYTES = 30 * 3 * 2 * 64 * 2
"""The bytes of a token: layers x KV heads x keys and values x head size x bytes of bfloat16."""
TTFT_SLO_S, TBT_SLO_S = 2.0, 0.15
SETTLING_S = 20.0


class Ended(NamedTuple):
    """An ended request: the performance counter at its end, its TTFT and its mean TBT in seconds."""

    at_s: float
    ttft_s: float
    tbt_s: float

    @property
    def meets_slos(self) -> bool:
        return self.ttft_s <= TTFT_SLO_S and self.tbt_s <= TBT_SLO_S


class Load:
    """Clients that send requests to one instance of a rig. All prompts are random tokens."""

    def __init__(self, on: Rig, owner: Instance) -> None:
        self._rig, self._owner, self._generator = on, owner, torch.Generator().manual_seed(0)
        self._num_begun = 0
        self.ended: list[Ended] = []

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            prompt = torch.randint(1000, 40000, (PROMPT,), generator=self._generator).tolist()
            self._num_begun += 1
            name, began_s = f"short{self._num_begun}", time.perf_counter()
            stream = await self._rig.begin(name, prompt, OUTPUT, self._owner, seed=self._num_begun)
            await stream.reached(OUTPUT)
            first_s, *_, last_s = stream.times_s
            self.ended.append(Ended(last_s, first_s - began_s, (last_s - first_s) / (OUTPUT - 1)))

    async def measure(self, seconds: float) -> list[Ended]:
        """Let the load settle, and return the requests that end in the `seconds` after that."""
        await asyncio.sleep(SETTLING_S)
        began_s = time.perf_counter()
        await asyncio.sleep(seconds)
        return [one for one in self.ended if one.at_s >= began_s]


async def run(layers: LayerRange | None, num_heads: int, seconds: int, *, two_hosts: bool) -> bool:
    """Measure two rounds of each arrangement, and print the table.

    Returns whether at least `LEAST_RATIO` times as many requests a second meet their SLOs with a helper as
    without.
    """
    device_bytes = f"{round(SHARE * NUM_TOKENS * TOKEN_BYTES)}B"
    found: dict[str, list[list[Ended]]] = {"alone": [], "with a helper": []}
    async with rig(NUM_CLIENTS, device_bytes=(device_bytes, "1GiB"), two_hosts=two_hosts) as on:
        owner = on.instances[NAMES[0]]
        load = Load(on, owner)
        asking = asyncio.create_task(load.run())
        try:
            for number in range(2):
                progress(f"alone, round {number + 1} of 2")
                found["alone"].append(await load.measure(seconds))
                progress(f"with a helper, round {number + 1} of 2")
                await on.place(owner, ModulesPart(num_heads, layers))
                found["with a helper"].append(await load.measure(seconds))
                await on.place(owner, ModulesPart())
        finally:
            asking.cancel()
            await asyncio.wait([asking])
    per_s = {
        way: (
            statistics.mean(len(ended) for ended in rounds) / seconds,
            statistics.mean(sum(one.meets_slos for one in ended) for ended in rounds) / seconds,
        )
        for way, rounds in found.items()
    }
    rows = []
    for way, rounds in found.items():
        ended = [one for of_round in rounds for one in of_round]
        rows.append(
            (
                way,
                f"{per_s[way][0]:.2f}",
                f"{per_s[way][1]:.2f}",
                f"{percentile([one.ttft_s for one in ended], 0.5):.2f} s",
                f"{percentile([one.ttft_s for one in ended], 0.9):.2f} s",
                f"{1000 * percentile([one.tbt_s for one in ended], 0.9):.0f} ms",
            )
        )
    print_table(
        f"KVCache for {SHARE:.0%} of the load, {NUM_CLIENTS} clients",
        ("", "requests/s", "within SLOs", "TTFT p50", "p90", "TBT p90"),
        rows,
        f"SLOs: TTFT {TTFT_SLO_S:g} s, mean TBT {1000 * TBT_SLO_S:.0f} ms.",
    )
    return per_s["with a helper"][1] >= LEAST_RATIO * per_s["alone"][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layers", type=LayerRange.parse, default=LayerRange(11, 30))
    which.add_argument("--heads", type=count, default=0, help="KV heads that move, in place of layers")
    parser.add_argument("--seconds", type=count, default=30, help="of each round")
    parser.add_argument("--two-hosts", action="store_true", help="the instances are connected by TCP")
    arguments = parser.parse_args()
    layers = None if arguments.heads else arguments.layers
    with heeding_sigterm():
        measured = run(layers, arguments.heads, arguments.seconds, two_hosts=arguments.two_hosts)
        sys.exit(not asyncio.run(measured))


if __name__ == "__main__":
    main()
