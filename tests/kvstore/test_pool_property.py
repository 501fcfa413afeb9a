"""Random operations of a client, on a real messenger with almost no DRAM and enough SSD, against a dict.

What was put and not removed is there, with its bytes: whichever tier it is in, whatever is moving, and
whichever messenger process it is.
"""

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pydantic import ByteSize

from kvstore.client.client import KVCachePool
from kvstore.client.leases import Lease
from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT
from mooncake.config.sections import KVCacheConfig
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolStats, Tier
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT, Node, unused

pytestmark = pytest.mark.cluster

NUM_PAGES = 8
NUM_SLOTS = 200
MOST_LEASED = 2
MOST_RESTARTS = 1
"""an example; each takes as long as a hundred other operations"""
TTL_S = 600.0
KEYS = [b"block %10d" % n for n in range(3 * NUM_PAGES)]

keys_drawn = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
some_keys_drawn = st.lists(st.sampled_from(KEYS), min_size=1, max_size=MOST_LEASED)
layers_drawn = st.tuples(st.integers(0, LAYOUT.num_layers - 1), st.integers(1, LAYOUT.num_layers)).map(
    lambda drawn: range(drawn[0], min(drawn[0] + drawn[1], LAYOUT.num_layers))
)


def space_for(num_pages: int) -> int:
    """Bytes of a segment or slab."""
    return 3 * ALIGNMENT + num_pages * (LAYOUT.block_bytes + record_bytes(LAYOUT.num_layers))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("pool")
    with contextlib.closing(Node(folder, "tiny", space_for(NUM_PAGES), "auto")) as node:
        # The longest timeout: a slow disk would excuse a block that is not found.
        node.kvcache = KVCacheConfig(
            low_watermark=0.25,
            high_watermark=0.5,
            ssd_dirs=[folder],
            ssd_bytes=ByteSize(space_for(NUM_SLOTS)),
            ssd_timeout_s=4,
        )
        node.start()
        await_listening(node)
        yield node


def await_listening(node: Node) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if probe.connect_ex(node.socket_path) == 0:
                return
        assert time.monotonic() < deadline_s, "the messenger does not listen"


def client_of(node: Node) -> KVCachePool:
    return KVCachePool.connect(f"unix:{node.socket_path}", fingerprint=FINGERPRINT, layout=LAYOUT)


class PoolMachine(RuleBasedStateMachine):
    """`blocks` is the model. Who removes a block and puts it again puts other bytes."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        if node.process is None or node.process.poll() is not None:  # an earlier example was too much for it
            node.start()
            await_listening(node)
        self.pool = client_of(self.node)
        self.pool.clear()
        self.blocks: dict[BlockKey, bytes] = {}
        self.hard: set[BlockKey] = set()
        self.soft: set[BlockKey] = set()
        self.lease: Lease | None = None
        self.leased: list[bytes | None] = []
        self.versions = itertools.count()
        self.num_restarts = 0

    # -- blocks -----------------------------------------------------------------------------------

    @initialize(keys=st.lists(st.sampled_from(KEYS), min_size=NUM_PAGES, unique=True))
    def begin(self, keys: list[BlockKey]) -> None:
        self.put(keys)

    @rule(keys=keys_drawn)
    def put(self, keys: list[BlockKey]) -> None:
        for key in keys:
            if key not in self.blocks:
                self.blocks[key] = np.random.default_rng(next(self.versions)).bytes(LAYOUT.block_bytes)
        self.pool.put(keys, [self.blocks[key] for key in keys], timeout_s=DEADLINE_S)

    @rule(keys=keys_drawn)
    def get(self, keys: list[BlockKey]) -> None:
        self.check_get(keys, range(LAYOUT.num_layers))

    @rule(keys=keys_drawn, layers=layers_drawn)
    def get_layers(self, keys: list[BlockKey], layers: range) -> None:
        self.check_get(keys, layers)

    def check_get(self, keys: Sequence[BlockKey], layers: range) -> None:
        buffers = [bytearray(len(layers) * LAYOUT.layer_bytes) for _ in keys]
        assert self.pool.get(keys, buffers, layers) == [key in self.blocks for key in keys]
        wanted = slice(layers.start * LAYOUT.layer_bytes, layers.stop * LAYOUT.layer_bytes)
        for key, buffer in zip(keys, buffers, strict=True):
            assert key not in self.blocks or buffer == self.blocks[key][wanted], "other bytes"

    @rule(keys=keys_drawn)
    def exists(self, keys: list[BlockKey]) -> None:
        tiers = self.pool.exists(keys)
        assert [tier is not None for tier in tiers] == [key in self.blocks for key in keys]
        assert all(tier is Tier.DRAM for key, tier in zip(keys, tiers, strict=True) if key in self.hard)

    @rule(keys=keys_drawn)
    def remove(self, keys: list[BlockKey]) -> None:
        assert self.pool.remove(keys) == len(self.blocks.keys() & set(keys))
        self.forget(keys)

    @rule(keys=keys_drawn, replaced=keys_drawn)
    def put_and_replace(self, keys: list[BlockKey], replaced: list[BlockKey]) -> None:
        """What is replaced may just be on its way to SSD, to make room for the others."""
        self.put(keys)
        self.remove(replaced)
        self.put(replaced)

    @precondition(lambda self: len(self.blocks) > 2 * NUM_PAGES)
    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == len(self.blocks)
        self.forget(KEYS)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self.hard.difference_update(keys)
        self.soft.difference_update(keys)
        for key in keys:
            self.blocks.pop(key, None)

    @rule(keys=keys_drawn)
    def prefetch(self, keys: list[BlockKey]) -> None:
        self.pool.prefetch(keys)

    @rule(keys=keys_drawn)
    def verify(self, keys: list[BlockKey]) -> None:
        assert self.pool.verify(keys) == (len(self.blocks.keys() & set(keys)), [])

    # -- what keeps blocks where they are ---------------------------------------------------------

    @rule(keys=some_keys_drawn, hard=st.booleans())
    def pin(self, keys: list[BlockKey], hard: bool) -> None:
        known = self.blocks.keys() & set(keys)
        if hard and len(self.hard | known) > NUM_PAGES // 2:
            with pytest.raises(PoolError, match="pinned hard"):
                self.pool.pin(keys, TTL_S, hard=True)
            return
        assert self.pool.pin(keys, TTL_S, hard=hard) == len(known)
        if hard:
            self.hard |= known
            self.soft -= known
        else:
            self.soft |= known - self.hard

    @rule(keys=keys_drawn)
    def unpin(self, keys: list[BlockKey]) -> None:
        least = len(self.hard.intersection(keys))  # a soft pin goes with its block
        assert least <= self.pool.unpin(keys) <= least + len(self.soft.intersection(keys))
        self.hard.difference_update(keys)
        self.soft.difference_update(keys)

    @precondition(lambda self: self.lease is None)
    @rule(keys=some_keys_drawn)
    def take_lease(self, keys: list[BlockKey]) -> None:
        self.lease = self.pool.lease(keys, TTL_S)
        self.leased = [self.blocks.get(key) for key in keys]
        assert [block is not None for block in self.lease.blocks] == [key in self.blocks for key in keys]

    @precondition(lambda self: self.lease is not None)
    @rule()
    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease.end()
        self.lease = None

    @invariant()
    def what_is_leased_stays_as_it_is(self) -> None:
        if self.lease is not None:
            for block, expected in zip(self.lease.blocks, self.leased, strict=True):
                assert block is None or bytes(block) == expected, "other bytes under a lease"

    # -- processes --------------------------------------------------------------------------------

    @rule()
    def reconnect(self) -> None:
        self.end_lease()
        self.pool.close()
        self.pool = client_of(self.node)

    @precondition(lambda self: self.num_restarts < MOST_RESTARTS and len(self.blocks) > NUM_PAGES)
    @rule()
    def kill_and_restart_the_messenger(self) -> None:
        """Whatever it was moving when it was killed. Leases and pins end with it."""
        self.num_restarts += 1
        self.node.kill()
        self.node.start()
        await_listening(self.node)
        self.end_lease()
        self.hard.clear()
        self.soft.clear()

    # -- in the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.check_get(KEYS, range(LAYOUT.num_layers))
            assert {info.key for _, info in self.pool.list_blocks()} == self.blocks.keys()
            self.end_lease()
            self.pool.unpin(KEYS)
            self.await_unused()
        finally:
            self.pool.close()

    def await_unused(self) -> None:
        """Nothing is lost when nobody uses anything: blocks that are on their way arrive."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not unused(stats := self.stats()) or stats.num_leases + stats.num_pins + stats.num_orphaned:
            assert time.monotonic() < deadline_s, f"pages are still in use: {stats}"

    def stats(self) -> PoolStats:
        (stats,) = self.pool.stats(check_integrity=True).values()
        return stats


def test_readers_who_want_more_than_fits_get_it_in_turn(node: Node) -> None:
    blocks = {key: np.random.default_rng(key[-1]).bytes(LAYOUT.block_bytes) for key in KEYS}

    def read(seed: int) -> list[str]:
        choices, faults = random.Random(seed), []
        for _ in range(50):
            keys = choices.sample(KEYS, 6)
            buffers = [bytearray(LAYOUT.block_bytes) for _ in keys]
            if not all(pool.get(keys, buffers)):
                faults.append("a block was not found")
            elif buffers != [blocks[key] for key in keys]:
                faults.append("a block had other bytes")
        return faults

    with client_of(node) as pool, ThreadPoolExecutor(6) as threads:
        pool.clear()
        pool.put(KEYS, [blocks[key] for key in KEYS])
        assert list(threads.map(read, range(6))) == [[]] * 6


def check(node: Node, num_examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: PoolMachine(node),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=60,
            database=None,
            phases=[Phase.generate],  # what depends on the time that a disk takes cannot be shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_pool_is_a_dict(node: Node) -> None:
    check(node, 45)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_pool_is_a_dict_for_long(node: Node) -> None:
    check(node, 1500)
