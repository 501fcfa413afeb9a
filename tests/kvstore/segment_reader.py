"""A program that reads blocks out of another process's segment as fast as it can, until it is killed.

    python -m tests.kvstore.segment_reader FD NUM_KEYS

The owner of the segment does not know of it. A block's bytes follow from its key. Each line on stdout has the
number of blocks found so far, and the number of those with wrong bytes.
"""

import os
import random
import sys

import numpy as np

from kvstore.pool.segment import Segment
from messenger.wire.messages import Fetch
from mooncake.messages.blocks import KEY_BYTES, BlockKey, KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=128, dtype="bfloat16")
_LINE_READS = 50


def key_of(number: int) -> BlockKey:
    return np.random.default_rng(number).bytes(KEY_BYTES)


def block_of(key: BlockKey) -> bytes:
    """Return the bytes that are stored under `key`. All of their words are different."""
    first, step = np.frombuffer(key, np.uint64)
    return (np.arange(LAYOUT.block_bytes // 8, dtype=np.uint64) * (step | np.uint64(1)) + first).tobytes()


def main(fd: int, num_keys: int) -> None:
    segment = Segment.open(fd)
    assert segment is not None
    catalogue = segment.catalogue()
    assert catalogue is not None
    keys = [key_of(number) for number in range(num_keys)]
    expected = {key: block_of(key) for key in keys}
    block, choice = bytearray(LAYOUT.block_bytes), random.Random(0)
    num_there = num_wrong = 0
    while True:
        for key in choice.choices(keys, k=_LINE_READS):
            if catalogue.read(Fetch([key], 0, LAYOUT.num_layers), [memoryview(block)]) is not None:
                num_there += 1
                num_wrong += block != expected[key]
        os.write(1, f"{num_there} {num_wrong}\n".encode())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
