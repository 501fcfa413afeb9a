"""The blocks of vLLM's own prefix cache, from messages that are written as plain maps."""

from typing import Any

import msgspec
import pytest

from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.kv_events import KVRemoved, KVStored
from mooncake.messages.pools import Tier
from tests.workers.vllm.events import CLEARED, HASHES, KEYS, ROOT, SIZE, TOKENS, payload, removed, stored
from workers.vllm.cached_blocks import CachedBlocks, Change


@pytest.fixture
def blocks() -> CachedBlocks:
    return CachedBlocks(SIZE)


def new(keys: list[bytes]) -> Change:
    return KVStored(Tier.DEVICE, keys)


def gone(keys: list[bytes]) -> Change:
    return KVRemoved(Tier.DEVICE, keys)


def test_keys_are_those_of_our_requests(blocks: CachedBlocks) -> None:
    assert blocks.receive(0, payload(stored(0, 2), stored(2, 5))) == [new(KEYS[:2]), new(KEYS[2:5])]
    assert blocks.receive(1, payload(removed(HASHES[3:5]))) == [gone(KEYS[3:5])]
    assert blocks.receive(2, payload(stored(3, 6))) == [new(KEYS[3:6])]
    assert blocks.keys == KEYS
    assert blocks.receive(3, payload(CLEARED, stored(0, 1))) == [gone(KEYS), new(KEYS[:1])]
    assert blocks.keys == KEYS[:1]
    assert blocks.num_leading_tokens(KEYS) == SIZE


def test_each_prompt_has_the_root_with_which_it_is_salted(blocks: CachedBlocks) -> None:
    root = root_key("model", "another tenant")
    salted = stored(0, 2, block_hashes=[1, 2], extra_keys=[[root.hex()], None])
    assert blocks.receive(0, payload(stored(0, 2), salted)) == [
        new(KEYS[:2]),
        new(block_keys(TOKENS[: 2 * SIZE], SIZE, root)),
    ]


@pytest.mark.parametrize(
    "event",
    [
        stored(2, 4),  # its parent is not known
        stored(0, 2, block_size=2),
        stored(0, 2, token_ids=TOKENS[:7]),
        stored(0, 2, lora_name="poet"),
        stored(0, 2, extra_keys=None),
        stored(0, 2, extra_keys=[None, None]),
        stored(0, 2, extra_keys=[[ROOT.hex()], ["image"]]),
        stored(0, 2, extra_keys=[["poet", ROOT.hex()], None]),
        stored(0, 2, extra_keys=[["a user's salt"], None]),
        stored(0, 2, extra_keys=[[ROOT.hex()[2:]], None]),
        stored(0, 2, group_idx=1),
    ],
)
def test_blocks_that_are_not_of_our_requests_are_left_out(
    blocks: CachedBlocks, event: dict[str, Any]
) -> None:
    assert blocks.receive(0, payload(event, removed(HASHES))) == []
    assert blocks.receive(1, payload(stored(0, 2))) == [new(KEYS[:2])]


def test_batches_are_taken_in_order_and_once(blocks: CachedBlocks) -> None:
    first, second = payload(stored(0, 2)), payload(stored(2, 4))
    assert blocks.receive(1, second) is None
    assert blocks.receive(0, first) == [new(KEYS[:2])]
    assert blocks.receive(0, first) == []
    assert blocks.receive(1, second) == [new(KEYS[2:4])]
    assert blocks.receive(3, second) is None
    assert blocks.next_sequence == 2


def test_lost_batches_take_all_blocks_with_them(blocks: CachedBlocks) -> None:
    """A block that was removed in them would else be believed in for ever."""
    blocks.receive(0, payload(stored(0, 3)))
    assert blocks.skip_to(7) == [gone(KEYS[:3])]
    assert blocks.receive(6, payload(stored(0, 3))) == []
    assert blocks.receive(7, payload(stored(3, 4), stored(0, 1))) == [new(KEYS[:1])]


@pytest.mark.parametrize(
    "message",
    [b"", b"x", msgspec.msgpack.encode([1.0, [{"type": "Other"}]]), payload(stored(0, 1, block_size="4"))],
)
def test_after_a_message_that_cannot_be_read_nothing_is_believed(
    blocks: CachedBlocks, message: bytes
) -> None:
    blocks.receive(0, payload(stored(0, 2)))
    assert blocks.receive(1, message) == [gone(KEYS[:2])]
    assert blocks.receive(2, payload(stored(0, 1))) == [new(KEYS[:1])]
