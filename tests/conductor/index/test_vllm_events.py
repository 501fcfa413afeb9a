"""vLLM's messages, written as plain maps and arrays, against keys derived from the whole prompt."""

import random
from typing import Any

import msgspec
import pytest

from conductor.index import vllm_events
from conductor.index.vllm_events import VllmEvents
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier

DRAM, SSD = Tier.DRAM, Tier.SSD
ROOT = root_key("model")
SIZE = 4
TOKENS = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, *range(100, 116)]
KEYS = block_keys(TOKENS, SIZE, ROOT)
HASHES: list[int | bytes] = [11, 2**64 - 1, b"h" * 32, -7, 15, 16]

FIELDS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]


def stored(first: int, stop: int, **changes: Any) -> dict[str, Any]:
    """Blocks [first, stop) of the prompt."""
    event = {
        "type": "BlockStored",
        "block_hashes": HASHES[first:stop],
        "parent_block_hash": HASHES[first - 1] if first else None,
        "token_ids": TOKENS[SIZE * first : SIZE * stop],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | changes


def removed(hashes: list[int | bytes], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: dict[str, Any], as_arrays: bool = False) -> bytes:
    written = [list(event.values()) for event in events] if as_arrays else list(events)
    return msgspec.msgpack.encode([12.5, written, 0])


@pytest.fixture
def events() -> VllmEvents:
    return VllmEvents(ROOT, SIZE)


@pytest.mark.parametrize("as_arrays", [False, True])
def test_keys_are_those_of_our_requests(events: VllmEvents, as_arrays: bool) -> None:
    def read(*written: dict[str, Any]) -> list[KVEvent]:
        return events.read(payload(*written, as_arrays=as_arrays))

    assert read(stored(0, 2), stored(2, 5)) == [KVStored(DRAM, KEYS[:2]), KVStored(DRAM, KEYS[2:5])]
    assert read(removed(HASHES[3:5])) == [KVRemoved(DRAM, KEYS[3:5])]
    assert read(stored(3, 6)) == [KVStored(DRAM, KEYS[3:6])]
    assert read(CLEARED, stored(0, 1)) == [KVCleared(), KVStored(DRAM, KEYS[:1])]
    assert len(events) == 1
    assert events.num_skipped == 0


def test_an_engine_may_write_maps_after_arrays_and_leave_fields_out(events: VllmEvents) -> None:
    assert events.read(payload(CLEARED, as_arrays=True)) == [KVCleared()]
    short = {name: value for name, value in stored(0, 1).items() if name in ["type", *FIELDS[:4]]}
    assert events.read(payload(short)) == [KVStored(DRAM, KEYS[:1])]
    assert events.read(payload(removed(HASHES[:1]), as_arrays=True)) == [KVRemoved(DRAM, KEYS[:1])]


def test_a_block_is_there_until_it_has_left_its_last_medium(events: VllmEvents) -> None:
    events.read(payload(stored(0, 3)))
    moved = {"parent_block_hash": None, "token_ids": [], "block_size": 0}
    assert events.read(payload(stored(0, 2, medium="CPU", **moved))) == []
    assert events.read(payload(stored(0, 1, medium="DISK", **moved))) == [KVStored(SSD, KEYS[:1])]
    assert events.read(payload(removed(HASHES[:3]))) == [KVRemoved(DRAM, KEYS[2:3])]
    assert events.read(payload(removed(HASHES[:2], "CPU"))) == [KVRemoved(DRAM, KEYS[:2])]
    assert events.read(payload(removed(HASHES[:2], "DISK"))) == [KVRemoved(SSD, KEYS[:1])]
    assert len(events) == 0


@pytest.mark.parametrize(
    "event",
    [
        stored(2, 4),  # its parent is not known
        stored(0, 2, block_size=2),
        stored(0, 2, token_ids=TOKENS[:7]),
        stored(0, 2, token_ids=[*TOKENS[:7], -1]),
        stored(0, 2, token_ids=[*TOKENS[:7], 2**32]),
        stored(0, 2, token_ids="tokens"),
        stored(0, 2, lora_id=1),
        stored(0, 2, lora_name="poet"),
        stored(0, 2, extra_keys=[None, ["salt"]]),
        stored(0, 2, group_idx=1),
    ],
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_blocks_without_a_key_of_ours_are_left_out(
    events: VllmEvents, event: dict[str, Any], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(vllm_events, "_native", lambda: None)
    assert events.read(payload(event, removed(HASHES))) == []
    assert events.num_skipped == 2
    assert events.read(payload(stored(0, 2))) == [KVStored(DRAM, KEYS[:2])]


@pytest.mark.parametrize(
    "message", [b"", b"x", payload({"type": "Other"}), payload(stored(0, 1, block_size="4"))]
)
def test_what_is_not_in_this_format_is_an_error(events: VllmEvents, message: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        events.read(message)
    assert events.read(payload(stored(0, 1))) == [KVStored(DRAM, KEYS[:1])]


def test_compiled_code_unpacks_as_msgspec_does(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    for num_ids in (0, 1, 15, 16, 300, 70_000):
        ids = [draw.getrandbits(draw.randrange(33)) for _ in range(num_ids)]
        packed = msgspec.msgpack.encode(ids)
        unpacked = vllm_events._unpacked(packed, num_ids)
        assert unpacked is not None
        assert unpacked.tolist() == ids
        for wrong in (packed[:-1], packed + b"\0", b""):
            assert vllm_events._unpacked(wrong, num_ids) is None
        assert vllm_events._unpacked(packed, num_ids + 1) is None
