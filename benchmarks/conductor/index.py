"""The prefix index alone: the time of a match, the memory of a block, KV events a second.

    python -m benchmarks.conductor.index NUM_INSTANCES NUM_BLOCKS      (one size, one JSON line)

Prompts have 64 blocks (16k tokens in blocks of 256). The first 8 blocks are a system prompt that every
instance holds. Each of the other blocks is held by one to four instances. A fifth of the prompts have the
second half of these blocks on SSD.

Owns: this workload, its tables. Does not know: placement.
"""

import gc
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from benchmarks.kvstore.index import resident_bytes
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.tools.arguments import counts
from conductor.index.prefix_index import PrefixIndex
from mooncake.messages.blocks import KEY_BYTES, BlockKey
from mooncake.messages.kv_events import FromKVEvents, KVEvent, KVEvents, KVStored
from mooncake.messages.pools import Tier

NUM_INSTANCES = (16, 100, 1000)
NUM_BLOCKS = (1_000, 100_000, 1_000_000)
MOST_BLOCKS = 10_000_000
MATCH_BARS_US = {16: 20, 100: 30, 1000: 60}
MEMORY_BAR_BYTES = 200
LEAST_BLOCKS_FOR_MEMORY = 100_000
"""The fewest blocks for which memory is measured. With fewer blocks, instances take most of the memory."""
EVENT_BAR = 500_000
PROMPT_BLOCKS, SHARED_BLOCKS = 64, 8
NUM_MATCHES = 2_000
NUM_ROUNDS = 5
_SEED = 7


def fill(index: PrefixIndex, num_instances: int, num_blocks: int, *, are_added: bool = False) -> int:
    """Add the blocks to the index, and return the number of prompts that they form.

    `are_added`: whether the instances are in the index already.
    """
    draw = random.Random(_SEED)
    names = [f"p{number}" for number in range(num_instances)]
    shared = keys_of(-1, SHARED_BLOCKS)
    for name in names:
        if not are_added:
            index.add_instance(name)
        index.apply(name, [KVStored(Tier.DRAM, shared)])
    own_blocks = PROMPT_BLOCKS - SHARED_BLOCKS
    num_prompts = max(1, num_blocks // own_blocks)
    for number in range(num_prompts):
        keys = keys_of(number, own_blocks)
        events: list[KVEvent] = [KVStored(Tier.DRAM, keys)]
        if draw.random() < 0.2:
            half = own_blocks // 2
            events = [KVStored(Tier.DRAM, keys[:half]), KVStored(Tier.SSD, keys[half:])]
        for name in draw.sample(names, min(4, 1 + int(draw.expovariate(1.5)))):
            index.apply(name, events)
    return num_prompts


def keys_of(number: int, num_keys: int) -> list[BlockKey]:
    """Return the keys of the blocks that only prompt `number` has; for -1, the shared keys.

    Equal arguments give equal keys.
    """
    joined = hashlib.shake_128(str(number).encode()).digest(KEY_BYTES * num_keys)
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def keys_of_prompt(number: int) -> list[BlockKey]:
    """Return all block keys of a prompt."""
    return keys_of(-1, SHARED_BLOCKS) + keys_of(number, PROMPT_BLOCKS - SHARED_BLOCKS)


def measure(num_instances: int, num_blocks: int) -> dict[str, float]:
    """Measure one size in this process. Returns bytes for each block, and microseconds for each match."""
    index = PrefixIndex()
    gc.collect()
    before_bytes = resident_bytes()
    num_prompts = fill(index, num_instances, num_blocks)
    gc.collect()
    held_bytes = resident_bytes() - before_bytes
    times_s = []
    for number in random.Random(_SEED).choices(range(num_prompts), k=NUM_MATCHES):
        keys = keys_of_prompt(number)
        started_s = time.perf_counter()
        index.match(keys)
        times_s.append(time.perf_counter() - started_s)
    times_s.sort()
    return {
        "bytes_per_block": held_bytes / index.num_blocks,
        "p50_us": 1e6 * statistics.median(times_s),
        "p99_us": 1e6 * times_s[int(0.99 * len(times_s))],
    }


def internal_messages(num_batches: int, batch_blocks: int) -> list[bytes]:
    """Return encoded batches of KV events, in the form in which messengers publish them."""
    encode = msgspec.msgpack.encode
    return [
        encode(KVEvents("p0", 1, sequence, [KVStored(Tier.DRAM, keys_of(sequence, batch_blocks))]))
        for sequence in range(num_batches)
    ]


def blocks_per_s(messages: Sequence[bytes], num_blocks: int, read: Callable[[bytes], list[KVEvent]]) -> float:
    """Return the blocks that one core applies in a second, from the bytes of a message to the index.

    The result is the median of some rounds. Each round begins with an empty index.
    """
    rates = []
    for _ in range(NUM_ROUNDS):
        index = PrefixIndex()
        index.add_instance("p0")
        started_s = time.process_time()
        for message in messages:
            index.apply("p0", read(message))
        rates.append(num_blocks / (time.process_time() - started_s))
        assert index.num_blocks == num_blocks
    return statistics.median(rates)


def event_rates() -> Iterator[tuple[int, float]]:
    """Yield pairs: the number of blocks in a message, and the blocks a second for such messages."""
    decode = msgspec.msgpack.Decoder(FromKVEvents).decode

    def events_of(message: bytes) -> list[KVEvent]:
        batch = decode(message)
        assert isinstance(batch, KVEvents)
        return batch.events

    for batch_blocks in (1, 64, 1000):
        messages = internal_messages(100_000 // max(10, batch_blocks), batch_blocks)
        yield batch_blocks, blocks_per_s(messages, len(messages) * batch_blocks, events_of)


def report(is_full: bool) -> None:
    """Print the tables. Each size is measured in a process of its own.

    `is_full`: whether `MOST_BLOCKS` is one of the sizes.
    """
    sizes = (*NUM_BLOCKS, MOST_BLOCKS) if is_full else NUM_BLOCKS
    rows = []
    for num_blocks in sizes:
        row = [f"{num_blocks:,}"]
        for num_instances in NUM_INSTANCES:
            progress(f"index: {num_blocks:,} blocks, {num_instances} instances")
            command = [sys.executable, "-m", __spec__.name, str(num_instances), str(num_blocks)]
            figures = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            row.append(f"{figures['p50_us']:.0f} / {figures['p99_us']:.0f} us")
        is_mostly_blocks = num_blocks >= LEAST_BLOCKS_FOR_MEMORY
        rows.append([*row, f"{figures['bytes_per_block']:.0f} B" if is_mostly_blocks else ""])
    bars = [f"{MATCH_BARS_US[number]} us" for number in NUM_INSTANCES]
    print_table(
        "Prefix index: a match of 64 blocks, p50 / p99",
        ["blocks", *(f"{number} instances" for number in NUM_INSTANCES), "memory a block, 1000 instances"],
        [*rows, ["bar, p50", *bars, f"{MEMORY_BAR_BYTES} B"]],
    )
    progress("index: events")
    print_table(
        "Prefix index: KV events, from a message's bytes to the index",
        ["blocks a message", "blocks/s of one core", "bar"],
        [
            [str(batch_blocks), f"{rate:,.0f}", f"{EVENT_BAR:,}" if batch_blocks > 1 else ""]
            for batch_blocks, rate in event_rates()
        ],
    )


if __name__ == "__main__":
    print(json.dumps(measure(*counts(__spec__.name, "NUM_INSTANCES", "NUM_BLOCKS"))))
