"""Copies of a layer in host memory, shared by several threads."""

import numpy as np
import pytest

from messenger.wire.checksums import copy_scattered
from workers.kvcache.copies import Copiers

LAYER_BYTES = 64 << 10


@pytest.mark.parametrize("num_blocks", [0, 1, 15, 16, 33, 100])
def test_threads_copy_what_one_would_with_checksums_in_order(num_blocks: int) -> None:
    blocks = np.random.default_rng(num_blocks).integers(0, 256, (num_blocks, LAYER_BYTES), np.uint8)
    one, several = np.zeros_like(blocks), np.zeros_like(blocks)
    places = np.arange(num_blocks, dtype=np.int64) * LAYER_BYTES
    backwards = np.ascontiguousarray(places[::-1])
    expected = copy_scattered(blocks.ctypes.data + backwards, one.ctypes.data + places, LAYER_BYTES)
    copiers = Copiers(num_threads=3)
    digests = copiers.copy(blocks.ctypes.data + backwards, several.ctypes.data + places, LAYER_BYTES)
    assert np.array_equal(digests, expected)
    assert np.array_equal(several, blocks[::-1])
