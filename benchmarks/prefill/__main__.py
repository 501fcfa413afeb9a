"""The costs of loads and stores during a prefill's computation, and the savings by reuse.

    python -m benchmarks.prefill [--only overlap|slow|reuse|window|fetch|pipeline|vllm]
                                 [--rounds N] [--tokens N,N,...]

The model has SmolLM2-135M's shape and random weights in bfloat16, and is computed by one thread. Messenger
processes are real, on one machine. In each round all ways are measured in turn. Tables have medians, and the
limits (*bars*) of some of them.

- overlap: prompts whose first half is in the pool, so that half of the KVCache is loaded and half is stored.
- slow: Figure 7 of the Mooncake paper: nothing is cached, and stores are throttled to the computation's time.
- reuse: a prompt of 4k tokens. 95% of its tokens are in DRAM: in the worker's own pool, or in another
  instance's pool that is reached over TCP.
- fetch: the prefix comes from another host, over a link whose bandwidth is limited to several values around
  the one at which a layer takes as long to arrive as to compute. Only root can make the other host: a network
  namespace.
- window: whole prompts on a device with memory for some layers at a time, and on one with memory for all.
- pipeline: two stages of one core each against one stage of one core, as `mooncake-serve` runs them, with the
  default model. The timeline of the last prompt of each size is written to `--timelines FOLDER`, as a Chrome
  trace and as a picture.
- vllm: the computation of the default model alone, by our engine and by vLLM's build for CPUs. vLLM is
  installed into `--peer-home FOLDER`, and compiles the model on the first run.

Owns: the comparisons, their tables and bars. Does not know: how a prefill is run.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.kvstore.mooncake_store import PeerError
from benchmarks.peers.vllm_cpu import HOME
from benchmarks.prefill.bench import BLOCK_SIZE, LAYOUT, Bench, instances, seal
from benchmarks.prefill.fetches import over_links
from benchmarks.prefill.peer import SIZES as PEER_TOKENS
from benchmarks.prefill.peer import beside_vllm
from benchmarks.prefill.pipeline import SIZES as PIPELINE_TOKENS
from benchmarks.prefill.pipeline import pipeline
from benchmarks.servers import heeding_sigterm
from kvstore.client.worker_client import WorkerClient
from mooncake.messages.pools import PoolShard, PrefixSource

OVERLAP_TOKENS = (1024, 2048, 4096, 8160)
REUSE_TOKENS, REUSED_SHARE = 4096, 0.95
MAX_EXTRA, MIN_SAVED = 0.05, 0.30
MAX_FROM_DRAM, MAX_FROM_TCP = 0.15, 0.25
ALONE, OVERLAP, NO_OVERLAP = "alone", "overlap", "no overlap"
WINDOWS = (4, 2)


async def both_ways(bench: Bench, num_rounds: int, sizes: Sequence[int]) -> bool:
    """Measure prompts of which half is loaded and half is stored, at full speed.

    Returns whether loads and stores add at most `MAX_EXTRA` to the computation's time.
    """
    print("| tokens, half of them cached | computation alone | with loads and stores | without overlap |")
    print("|---|---|---|---|", flush=True)
    is_met = True
    for num_tokens in sizes:
        num_blocks = num_tokens // 2 // BLOCK_SIZE
        times: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(num_rounds):
            ways = [
                (ALONE, bench.no_transfers()),
                (OVERLAP, bench.transfers()),
                (NO_OVERLAP, bench.transfers(overlap=False)),
            ]
            first = number % len(ways)  # each of them goes first in turn
            for name, transfers in ways[first:] + ways[:first]:
                tokens = bench.new_prompt(num_tokens)
                await seal(bench.pool, tokens, num_blocks)
                num_cached = num_blocks * BLOCK_SIZE
                times[name].append(await bench.prefill_s(tokens, transfers, num_cached_tokens=num_cached))
        alone_s, with_s, without_s = medians(times)
        extra = with_s / alone_s - 1
        is_met &= extra <= MAX_EXTRA
        print(
            f"| {num_tokens} | {alone_s:.3f} s | {with_s:.3f} s ({extra:+.1%}, bar {MAX_EXTRA:+.0%}) "
            f"| {without_s:.3f} s ({without_s / alone_s - 1:+.1%}) |",
            flush=True,
        )
    return is_met


def medians(times: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Return the medians of three ways: computation alone, with overlap, and without overlap."""
    return (
        statistics.median(times[ALONE]),
        statistics.median(times[OVERLAP]),
        statistics.median(times[NO_OVERLAP]),
    )


async def slow_stores(bench: Bench, num_rounds: int, sizes: Sequence[int]) -> bool:
    """Measure prefills whose stores take the time of the computation.

    Returns whether overlap saves at least `MIN_SAVED` of the time without overlap.
    """
    print("| tokens, slow stores | computation alone | overlap | no overlap | saved |")
    print("|---|---|---|---|---|", flush=True)
    is_met = True
    for num_tokens in sizes:
        num_copies = -(-num_tokens // BLOCK_SIZE) * LAYOUT.num_layers
        times: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            alone_s = await bench.prefill_s(bench.new_prompt(num_tokens), bench.no_transfers())
            times[ALONE].append(alone_s)
            for name in (OVERLAP, NO_OVERLAP):
                slow = bench.transfers(overlap=name == OVERLAP, seconds_per_copy=alone_s / num_copies)
                times[name].append(await bench.prefill_s(bench.new_prompt(num_tokens), slow))
        alone_s, with_s, without_s = medians(times)
        saved = 1 - with_s / without_s
        is_met &= saved >= MIN_SAVED
        print(
            f"| {num_tokens} | {alone_s:.3f} s | {with_s:.3f} s | {without_s:.3f} s "
            f"| {saved:.0%} (bar {MIN_SAVED:.0%}) |",
            flush=True,
        )
    return is_met


async def reuse(bench: Bench, holder: WorkerClient, num_rounds: int) -> bool:
    """Measure prefills that reuse a prefix.

    Returns whether they take at most `MAX_FROM_DRAM` and `MAX_FROM_TCP` of the time of a prefill without
    reuse.
    """
    num_blocks = -(-int(REUSE_TOKENS * REUSED_SHARE) // BLOCK_SIZE)
    num_cached = num_blocks * BLOCK_SIZE
    bars = {"the own DRAM": (bench.pool, MAX_FROM_DRAM), "another instance, TCP": (holder, MAX_FROM_TCP)}
    full: list[float] = []
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        full.append(await bench.prefill_s(bench.new_prompt(REUSE_TOKENS), bench.transfers()))
        for name, (pool, _bar) in bars.items():
            tokens = bench.new_prompt(REUSE_TOKENS)
            await seal(pool, tokens, num_blocks)
            source = PrefixSource((PoolShard(pool.address, LAYOUT),), num_blocks)
            elapsed_s = await bench.prefill_s(
                tokens, bench.transfers(), source=source, num_cached_tokens=num_cached
            )
            times[name].append(elapsed_s)
    full_s = statistics.median(full)
    print(f"| {num_cached} of {REUSE_TOKENS} tokens from | to the first token | of the full time |")
    print("|---|---|---|")
    print(f"| nothing reused | {full_s:.3f} s | |")
    is_met = True
    for name, (_pool, bar) in bars.items():
        elapsed_s = statistics.median(times[name])
        is_met &= elapsed_s <= bar * full_s
        print(f"| {name} | {elapsed_s:.3f} s | {elapsed_s / full_s:.1%} (bar {bar:.0%}) |", flush=True)
    return is_met


async def windows(bench: Bench, num_rounds: int, sizes: Sequence[int]) -> None:
    """Measure the cost of a layer window. There is no limit for it."""
    benches: dict[int | None, Bench] = {None: bench}
    for window in WINDOWS:
        benches[window] = Bench(bench.pool, window)
    for each in benches.values():
        await each.prefill_s(bench.new_prompt(1024), each.transfers())
    print(f"| tokens | all layers | {' | '.join(f'{window} of {LAYOUT.num_layers}' for window in WINDOWS)} |")
    print("|---|---|" + "---|" * len(WINDOWS), flush=True)
    for num_tokens in sizes:
        times: defaultdict[int | None, list[float]] = defaultdict(list)
        for number in range(num_rounds):
            order = list(benches.items())
            for key, each in order[number % len(order) :] + order[: number % len(order)]:
                times[key].append(await each.prefill_s(bench.new_prompt(num_tokens), each.transfers()))
        cells = []
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        for key in benches:
            size_bytes = num_blocks * LAYOUT.layer_bytes * (key or LAYOUT.num_layers)
            elapsed_s, all_s = statistics.median(times[key]), statistics.median(times[None])
            extra = f" ({elapsed_s / all_s - 1:+.1%})" if key else ""
            cells.append(f"{elapsed_s:.3f} s{extra}, {size_bytes / 2**20:.0f} MiB")
        print(f"| {num_tokens} | {' | '.join(cells)} |", flush=True)


async def beside_transfers(only: str | None, num_rounds: int, sizes: Sequence[int]) -> bool:
    """Measure overlap, slow stores and reuse. Returns whether all figures are within their limits."""
    is_met = True
    async with instances() as (pool, holder):
        bench = Bench(pool)
        await bench.prefill_s(bench.new_prompt(1024), bench.transfers())  # first calls allocate
        if only in (None, "overlap"):
            is_met &= await both_ways(bench, num_rounds, sizes)
            print()
        if only in (None, "slow"):
            is_met &= await slow_stores(bench, num_rounds, sizes)
            print()
        if only in (None, "reuse"):
            is_met &= await reuse(bench, holder, num_rounds)
            print()
        if only in (None, "window"):
            await windows(bench, num_rounds, sizes)
    return is_met


async def measure(arguments: argparse.Namespace) -> bool:
    """Run the comparisons that the command line names.

    Returns whether all figures are within their limits.
    """
    only, num_rounds = arguments.only, arguments.rounds
    sizes = [int(size) for size in arguments.tokens.split(",")] if arguments.tokens else None
    is_met = True
    if only not in ("fetch", "pipeline", "vllm"):
        is_met &= await beside_transfers(only, num_rounds, sizes or OVERLAP_TOKENS)
    if only == "fetch" or (only is None and os.geteuid() == 0):
        print()
        is_met &= await over_links(num_rounds)
    if only in (None, "pipeline"):
        print()
        is_met &= await pipeline(
            arguments.stages, num_rounds, sizes or PIPELINE_TOKENS, arguments.chunks, arguments.timelines
        )
    return is_met


def main() -> None:
    """Run the benchmark. Exit with 1 if a result misses its limit (its *bar*), or if the peer fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefill",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    sections = ["overlap", "slow", "reuse", "window", "fetch", "pipeline", "vllm"]
    parser.add_argument("--only", choices=sections)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", help="of all sections but reuse and fetch")
    parser.add_argument("--stages", type=int, default=2, help="of section pipeline")
    parser.add_argument(
        "--chunks", choices=["balanced", "fixed"], default="balanced", help="of section pipeline"
    )
    parser.add_argument(
        "--timelines", type=Path, default=Path(), metavar="FOLDER", help="of section pipeline"
    )
    parser.add_argument("--peer-home", type=Path, default=HOME, metavar="FOLDER", help="of section vllm")
    arguments = parser.parse_args()
    arguments.timelines.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    is_met = asyncio.run(measure(arguments))
    if arguments.only in (None, "vllm"):
        print()
        sizes = [int(size) for size in arguments.tokens.split(",")] if arguments.tokens else PEER_TOKENS
        try:
            with heeding_sigterm():
                is_met &= beside_vllm(arguments.rounds, sizes, arguments.peer_home)
        except PeerError as error:
            sys.exit(str(error))
    if not is_met:
        sys.exit("a bar is not met")


if __name__ == "__main__":
    main()
