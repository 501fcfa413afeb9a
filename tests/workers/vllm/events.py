"""KV events of one prompt, as vLLM writes them."""

from typing import Any

import msgspec

from mooncake.messages.blocks import block_keys, root_key

ROOT = root_key("model")
SIZE = 4
TOKENS = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, *range(100, 116)]
KEYS = block_keys(TOKENS, SIZE, ROOT)
HASHES: list[int | bytes] = [11, 2**64 - 1, b"h" * 32, 7, 15, 16]
CLEARED = {"type": "AllBlocksCleared"}


def stored(first: int, stop: int, **changes: Any) -> dict[str, Any]:
    """Return the event that blocks `[first, stop)` of the prompt were stored.

    The first block is salted with the prompt's root key.
    """
    event = {
        "type": "BlockStored",
        "block_hashes": HASHES[first:stop],
        "parent_block_hash": HASHES[first - 1] if first else None,
        "token_ids": TOKENS[SIZE * first : SIZE * stop],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None if number else [ROOT.hex()] for number in range(first, stop)],
        "group_idx": 0,
    }
    return event | changes


def removed(hashes: list[int | bytes]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def payload(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])
