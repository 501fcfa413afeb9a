"""The hit rate of a KVCache pool on a trace, by eviction policy and capacity (Mooncake, Table 1).

    .venv/bin/python -m benchmarks.hit_rate TRACE.jsonl.gz

The trace is replayed through the pool's own code with tiny pages. Each request reserves the blocks of its
prompt, stores the missing ones, and leaves. Below the low watermark blocks are evicted up to the high
watermark; both have their default values. The trace has one line for each request, with `input_length`
(tokens) and `hash_ids`, one id for each 512-token block of the prompt; equal ids mean equal prefixes.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.pool.pages import PageTable
from kvstore.pool.pool import Pool
from mooncake.config.policies import EvictionPolicy
from mooncake.config.sections import KVCacheConfig
from mooncake.messages.blocks import KEY_BYTES

BLOCK_TOKENS = 512
CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)


class Prompt(NamedTuple):
    """One request: the keys of its blocks, and its number of tokens. The last block may be partial."""

    keys: list[bytes]
    num_tokens: int


class HitRate(NamedTuple):
    """The hit rates of blocks and of tokens.

    For `blocks` every found block counts. For `tokens` only prefixes count, as a prefill reuses nothing else.
    """

    blocks: float
    tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hit_rate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("trace", type=Path)
    prompts = read_trace(parser.parse_args().trace)
    num_blocks = sum(len(prompt.keys) for prompt in prompts)
    num_unique = len({key for prompt in prompts for key in prompt.keys})
    print(f"{len(prompts)} requests, {num_blocks} blocks, {num_unique} of them different\n")
    print("| policy | " + " | ".join("inf" if c is None else f"{c:,}" for c in CAPACITIES) + " |")
    print("|---|" + "---|" * len(CAPACITIES))
    for policy in EvictionPolicy:
        cells = []
        for capacity in CAPACITIES:
            started_s = time.monotonic()
            rate = replay(prompts, policy, capacity or 2 * num_unique)
            cells.append(f"{rate.blocks:.3f} ({rate.tokens:.3f})")
            print(f"{policy} {capacity}: {time.monotonic() - started_s:.1f} s", file=sys.stderr)
        print(f"| {policy} | " + " | ".join(cells) + " |", flush=True)


def read_trace(path: Path) -> list[Prompt]:
    """Return the prompts of a trace. Raises OSError, or ValueError for a line that is not a request."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        requests = [json.loads(line) for line in lines]
    return [
        Prompt([block.to_bytes(KEY_BYTES) for block in r["hash_ids"]], r["input_length"]) for r in requests
    ]


def replay(prompts: Sequence[Prompt], policy: EvictionPolicy, num_pages: int) -> HitRate:
    """Return the hit rates of one pool of `num_pages` that serves all requests one after the other."""
    pool = Pool(PageTable.in_memory(num_pages, 1), policy=policy)
    watermarks = KVCacheConfig()
    num_hits = num_blocks = num_hit_tokens = num_tokens = 0
    for prompt in prompts:
        reservation = pool.reserve(1, prompt.keys, 0)
        found = [block.found for block in reservation.blocks]
        num_hits += sum(found)
        num_blocks += len(found)
        prefix_len = found.index(False) if False in found else len(found)
        num_hit_tokens += min(prefix_len * BLOCK_TOKENS, prompt.num_tokens)
        num_tokens += prompt.num_tokens
        for block in reservation.blocks:
            if not block.found:
                pool.record_arrival(block, range(1), bytes(8))
        pool.release(reservation.reservation_id)
        if pool.allocator.num_free < int(watermarks.low_watermark * num_pages):
            pool.evictor.make_room(int(watermarks.high_watermark * num_pages))
    return HitRate(num_hits / num_blocks, num_hit_tokens / num_tokens)


if __name__ == "__main__":
    main()
