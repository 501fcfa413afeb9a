"""Blocks whose layers come one after another: stored when the last one is there, or not at all."""

from collections.abc import Iterator, Sequence
from ctypes import memmove
from pathlib import Path

import numpy as np
import pytest
import xxhash

from messenger.wire.checksums import Addresses, Digests
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from tests.kvstore.nodes import LAYOUT, block_bytes, prompt_keys
from tests.kvstore.pools import Pool, Pools, until

EACH_DOOR = pytest.mark.parametrize("door", ["unix", "tcp"])


@pytest.fixture
def pools(short_tmp_path: Path) -> Iterator[Pools]:
    with Pools(short_tmp_path) as pools:
        yield pools


class _StepEndedError(Exception):
    pass


class Source:
    """A copy of what a model would compute for these keys."""

    def __init__(self, keys: Sequence[BlockKey], fails_at: int | None = None) -> None:
        self.keys, self.fails_at = keys, fails_at
        self.asked: list[tuple[range, list[int]]] = []

    def __call__(self, layers: range, positions: Sequence[int], targets: Addresses) -> Digests:
        if self.fails_at in layers:
            raise _StepEndedError("the step has ended")
        self.asked.append((layers, list(positions)))
        digests = np.empty((len(positions), len(layers)), np.uint64)
        for row, (position, target) in enumerate(zip(positions, targets.tolist(), strict=True)):
            for column, layer in enumerate(layers):
                data = block_bytes(self.keys[position], layer)
                memmove(target + column * LAYOUT.layer_bytes, data, len(data))
                digests[row, column] = xxhash.xxh3_64_intdigest(data)
        return digests


def whole(key: BlockKey) -> bytes:
    return b"".join(block_bytes(key, layer) for layer in LAYOUT.layers)


@EACH_DOOR
def test_what_was_copied_layer_by_layer_is_read_whole(pools: Pools, door: str) -> None:
    pool = pools.start()
    keys = prompt_keys(10)
    with pool.client(getattr(pool, door)) as client:
        client.put(keys[2:3], [whole(keys[2])])
        source = Source(keys)
        client.put_layers(keys, source)
        out = [bytearray(LAYOUT.block_bytes) for _ in keys]
        assert all(client.get(keys, out))
        assert out == [whole(key) for key in keys]
        assert 2 not in {position for _, positions in source.asked for position in positions}
        until(client, lambda stats: stats.num_used == stats.num_reservations == 0)


def _one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.connections._WRITTEN_BYTES", 1)


@EACH_DOOR
@pytest.mark.parametrize("fails_at", [0, 2, 3])
def test_a_copy_that_ends_early_leaves_nothing(
    pools: Pools, door: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_layer_at_a_time(monkeypatch)
    pool = pools.start()
    keys = prompt_keys(3)
    with pool.client(getattr(pool, door)) as client:
        with pytest.raises(_StepEndedError):
            client.put_layers(keys, Source(keys, fails_at))
        assert client.exists(keys) == [None, None, None]
        until(client, lambda stats: stats.num_used == stats.num_reservations == 0)
        source = Source(keys)
        client.put_layers(keys, source)
        assert client.prefix_len(keys) == 3
        assert [layers for layers, _ in source.asked] == [range(layer, layer + 1) for layer in LAYOUT.layers]


def test_a_full_pool_is_said(pools: Pools) -> None:
    pool = pools.start(num_pages=4)
    keys, others = prompt_keys(4), prompt_keys(4, first_token=1000)
    with pool.client() as client:
        client.put_layers(keys, Source(keys))
        with client.lease(keys), pytest.raises(PoolFullError):
            client.put_layers(others, Source(others), timeout_s=0)


def test_a_messenger_that_is_killed_is_written_to_no_more(pools: Pools) -> None:
    pool = pools.start()
    keys = prompt_keys(3)

    class Killing(Source):
        def __call__(self, layers: range, positions: Sequence[int], targets: Addresses) -> Digests:
            digests = super().__call__(layers, positions, targets)
            if len(self.asked) == 1:
                _kill(pool)
            return digests

    with pool.client(timeout_s=5) as client, pytest.raises(PoolError):
        client.put_layers(keys, Killing(keys))


def _kill(pool: Pool) -> None:
    pool.kill()
