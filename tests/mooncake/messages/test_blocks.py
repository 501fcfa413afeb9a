import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.messages.blocks import KVLayout, block_keys, common, model_fingerprint, root_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)
ROOT = root_key("model")
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


@given(TOKENS, st.integers(1, 16))
def test_keys_are_chained_hashes_of_full_blocks(tokens: list[int], block_size: int) -> None:
    expected, parent = [], ROOT
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}I", *block)).digest()[:16]
        expected.append(parent)
    assert block_keys(tokens, block_size, ROOT) == expected


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int]) -> None:
    for index, (key_a, key_b) in enumerate(zip(block_keys(a, 4, ROOT), block_keys(b, 4, ROOT), strict=False)):
        assert (key_a == key_b) == (a[: 4 * index + 4] == b[: 4 * index + 4])


def test_models_and_tenants_never_meet() -> None:
    roots = {root_key("m"), root_key("m", "tenant"), root_key("mt", "enant"), root_key("n")}
    assert len(roots) == 4


def test_layout_arithmetic_of_smollm2() -> None:
    assert LAYOUT.layer_bytes == 3 * 2 * 16 * 64 * 2
    assert LAYOUT.block_bytes == 30 * LAYOUT.layer_bytes
    assert [LAYOUT.num_blocks(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]


def test_fingerprint_covers_everything_that_changes_a_byte() -> None:
    layout = KVLayout(2, 1, 8, 16, "float32")
    variants = {
        model_fingerprint("a", "w", "float32", layout),
        model_fingerprint("b", "w", "float32", layout),
        model_fingerprint("a", "x", "float32", layout),
        model_fingerprint("a", "w", "bfloat16", layout),
        model_fingerprint("a", "w", "float32", KVLayout(2, 1, 8, 32, "float32")),
    }
    assert len(variants) == 5


def test_a_shard_knows_which_layers_of_the_model_it_has() -> None:
    shard = LAYOUT.of_layers(range(2, 5))
    assert (shard.first_layer, shard.num_layers, shard.layers) == (2, 3, range(2, 5))
    assert shard.block_bytes == 3 * LAYOUT.layer_bytes
    assert shard.positions(range(2, 5)) == range(3)
    assert shard.positions(range(3, 4)) == range(1, 2)
    for layers in (range(1, 3), range(4, 6), range(3, 3), range(5, 6), range(4, 2)):
        with pytest.raises(ValueError, match=r"are no part of \[2, 5\)"):
            shard.positions(layers)
    with pytest.raises(ValueError, match="at least 1"):
        LAYOUT.of_layers(range(0))


def test_a_shard_knows_which_heads_of_the_model_it_has() -> None:
    shard = LAYOUT.of_heads(range(1, 3)).of_layers(range(2, 5))
    assert (shard.first_head, shard.num_kv_heads, shard.heads) == (1, 2, range(1, 3))
    assert shard.head_bytes == LAYOUT.head_bytes == LAYOUT.layer_bytes // 3
    assert shard.layer_bytes == 2 * shard.head_bytes
    assert shard.block_bytes == 3 * shard.layer_bytes
    assert shard.head_positions(range(1, 3)) == range(2)
    assert shard.head_positions(range(2, 3)) == range(1, 2)
    for heads in (range(2), range(2, 4), range(2, 2), range(3, 4), range(2, 1)):
        with pytest.raises(ValueError, match=r"heads .* are no part of \[1, 3\)"):
            shard.head_positions(heads)
    with pytest.raises(ValueError, match="at least 1"):
        LAYOUT.of_heads(range(1, 1))
    with pytest.raises(ValueError, match="at least 1"):
        LAYOUT.of_heads(range(-1, 1))


def test_what_two_ranges_have_in_common() -> None:
    assert common(range(4), range(2, 6)) == range(2, 4)
    assert common(range(2, 6), range(4)) == range(2, 4)
    assert common(range(3), range(3)) == range(3)
    assert not common(range(2), range(2, 4))
    assert not common(range(2, 4), range(1))


def test_shards_travel_with_their_place_and_whole_blocks_without() -> None:
    for layout in (LAYOUT, LAYOUT.of_layers(range(3, 4)).of_heads(range(2, 3))):
        encoded = msgspec.msgpack.encode(layout)
        assert msgspec.msgpack.decode(encoded, type=KVLayout) == layout
        assert (b"first_head" in encoded) == (layout != LAYOUT)
