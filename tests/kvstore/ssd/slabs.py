"""Slabs for tests, and blocks with different contents."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from kvstore.ssd.slab import Record, Slab
from mooncake.messages.blocks import KVLayout

FINGERPRINT = "f" * 32
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=128, dtype="bfloat16")
LAYERS = range(LAYOUT.num_layers)
SIZE_BYTES = 3 << 20
NOBODY = 65534


def open_slab(directory: Path, *, size_bytes: int = SIZE_BYTES) -> Slab:
    return Slab.open(directory, "a", size_bytes, FINGERPRINT, LAYOUT)


def aligned_block(content: bytes = b"") -> memoryview:
    """Return memory for one slot that begins with `content`, aligned as in a segment."""
    block = memoryview(mmap.mmap(-1, LAYOUT.block_bytes))
    block[: len(content)] = content
    return block


def block_of(key: bytes) -> memoryview:
    """Return the block that these tests store under `key`. Its content is unique."""
    data = np.random.default_rng(int.from_bytes(key, "little")).bytes(LAYOUT.block_bytes - len(key))
    return aligned_block(key + data)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def checksums_of(block: memoryview) -> bytes:
    layers = [block[layer * LAYOUT.layer_bytes : (layer + 1) * LAYOUT.layer_bytes] for layer in LAYERS]
    return b"".join(xxhash.xxh3_64_intdigest(layer).to_bytes(8, "little") for layer in layers)


def store(stored_in: Slab, slot: int, number: int) -> None:
    """Store one block as the SSD tier does."""
    block = block_of(key_of(number))
    record = Record(key_of(number), checksums_of(block), last_use=number, position=0, num_uses=1)
    stored_in.store(slot, block, record)


def load(stored_in: Slab, slot: int) -> memoryview:
    block = aligned_block()
    stored_in.read(slot, block)
    return block


def numbers_found(stored_in: Slab) -> dict[int, int]:
    """Adopt a slab's blocks, verify them all, and return the number of each by slot."""
    found = {}
    for slot in stored_in.table.adopt().sealed:
        block = load(stored_in, slot)
        assert stored_in.table.is_intact(slot)
        assert stored_in.table.checksums(slot, LAYERS) == checksums_of(block)
        assert block[:16] == stored_in.table.key(slot)
        found[slot] = int.from_bytes(block[:16], "little")
    return found


def forked(child: Callable[..., None], *arguments: object) -> int:
    """Fork a process that calls `child`, and return its pid. Its exit code is 0 unless the call raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(*arguments)
            code = 0
        finally:
            os._exit(code)
    return pid


def files_open_in(directory: Path) -> list[Path]:
    """Return the files in `directory` that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return [path for link in links if (path := Path(os.path.realpath(link))).is_relative_to(directory)]
