"""Those of one host find a pool's sealed blocks in its segment, and take no other block for one of them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from msgspec import structs

from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from messenger.shm.catalogue import Catalogue
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import Fetch
from mooncake.messages.blocks import KVLayout
from tests.kvstore.nodes import FINGERPRINT

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
LAYERS = range(LAYOUT.num_layers)


class Node:
    """A pool in a segment."""

    def __init__(self, fd: int) -> None:
        self.segment = Segment.open(fd) or Segment.format(fd, FINGERPRINT, LAYOUT)
        catalogue = self.segment.catalogue()
        assert catalogue is not None
        self.catalogue: Catalogue = catalogue
        self.pool = Pool(self.segment.page_table(), on_sealed=catalogue.note)

    def store(self, keys: list[bytes]) -> None:
        """Blocks with bytes that are their keys', over and over."""
        reservation = self.pool.reserve(1, keys, 0)
        for block in reservation.blocks:
            if not block.found:
                assert block.key is not None
                view = self.segment.page_view(block.page)
                view[:] = content(block.key)
                checksums = layer_checksums(view, LAYOUT.layer_bytes)
                self.pool.record_arrival(block, LAYERS, checksums)
        self.pool.release(reservation.reservation_id)


@contextmanager
def node(num_bytes: int = 1 << 18) -> Iterator[Node]:
    fd = os.memfd_create("segment")
    os.truncate(fd, num_bytes)
    try:
        yield Node(fd)
    finally:
        os.close(fd)


def content(key: bytes) -> bytes:
    return key * (LAYOUT.block_bytes // len(key))


def new_keys(num_keys: int, seed: int = 1) -> list[bytes]:
    packed = np.random.default_rng(seed).bytes(16 * num_keys)
    return [packed[start : start + 16] for start in range(0, len(packed), 16)]


def read(catalogue: Catalogue, key: bytes) -> bytes | None:
    buffer = bytearray(LAYOUT.block_bytes)
    found = catalogue.read(Fetch([key], 0, LAYOUT.num_layers), [memoryview(buffer)])
    if found is None:
        return None
    assert found == {0: layer_checksums(memoryview(buffer), LAYOUT.layer_bytes)}
    return bytes(buffer)


def test_a_block_is_found_from_its_seal_to_its_eviction() -> None:
    with node() as pool_node:
        pool, (one, other, damaged) = pool_node.pool, new_keys(3)
        assert read(pool_node.catalogue, one) is None
        pool_node.store([one, other, damaged])
        assert read(pool_node.catalogue, one) == content(one)
        assert pool.num_used_pages == 0  # whoever reads holds nothing
        assert pool.remove(one)
        assert read(pool_node.catalogue, one) is None
        assert read(pool_node.catalogue, other) == content(other)
        page = pool.find(damaged)
        assert page is not None
        pool_node.segment.page_view(page)[-1] ^= 1
        assert read(pool_node.catalogue, damaged) is None


def test_what_an_earlier_life_has_sealed_is_found_though_it_noted_nothing() -> None:
    fd = os.memfd_create("segment")
    os.truncate(fd, 1 << 18)
    try:
        first, keys = Node(fd), new_keys(5)
        first.pool.allocator._on_sealed = lambda pages: None
        first.store(keys)
        assert all(read(first.catalogue, key) is None for key in keys)
        second = Node(fd)
        assert all(read(second.catalogue, key) == content(key) for key in keys)
    finally:
        os.close(fd)


def test_of_a_full_pool_nearly_every_block_is_found_however_often_others_were_there() -> None:
    with node(1 << 22) as pool_node:
        num_pages = pool_node.segment.num_pages
        for seed in range(4):
            keys = new_keys(num_pages, seed)
            for start in range(0, num_pages, 50):
                pool_node.store(keys[start : start + 50])
            num_found = sum(read(pool_node.catalogue, key) is not None for key in keys)
            assert num_found >= 0.998 * num_pages


def test_no_other_block_is_taken_for_one_that_was_evicted_under_the_reader() -> None:
    """A thread reads as fast as it can while blocks come and go in their pages."""
    with node(1 << 17) as pool_node:
        keys = new_keys(3 * pool_node.segment.num_pages)
        has_ended, num_there, mistakes = threading.Event(), 0, 0

        def run() -> None:
            nonlocal num_there, mistakes
            while not has_ended.is_set():
                for key in keys:
                    found = read(pool_node.catalogue, key)
                    num_there += found is not None
                    mistakes += found is not None and found != content(key)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            num_rounds = 0
            while num_rounds < 50 or (num_there < 200 and num_rounds < 5000):
                pool_node.store(keys[num_rounds % len(keys) :][:4])
                num_rounds += 1
        finally:
            has_ended.set()
            thread.join()
        assert mistakes == 0
        assert num_there


@pytest.mark.parametrize("field", ["states", "generations"])
def test_a_block_that_goes_while_it_is_copied_counts_as_not_there(field: str) -> None:
    """What says that it is there lies where it is copied to: the copy takes that away, and is intact."""
    with node() as pool_node:
        (key,) = new_keys(1)
        pool_node.store([key])
        segment, size = pool_node.segment, len(pool_node.segment.buffer)
        allocators, name = segment._page_table(), f"{field}_offset"
        start = getattr(allocators, name)
        buffer = memoryview(bytearray(segment.buffer) + segment.buffer[start:])
        catalogue = Catalogue.at(buffer, structs.replace(allocators, **{name: size}), LAYOUT)
        assert catalogue is not None
        assert read(catalogue, key) == content(key)
        target = buffer[size : size + LAYOUT.block_bytes]
        assert catalogue.read(Fetch([key], 0, LAYOUT.num_layers), [target]) is None
        assert target == content(key)
