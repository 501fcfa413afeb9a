"""KV events in vLLM's format (as of 0.32), read into ours.

vLLM names blocks by hashes of its own. So the keys are derived again from the token ids and the parent's key,
under the root of our requests' keys. Blocks whose keys cannot be derived are left out, which costs a hit:
blocks with an unknown parent, of another size, or with a LoRA adapter, a cache salt or an image.

Owns: vLLM's event structs, the key of each of its hashes. Does not know: sockets, sequence numbers.
"""

import ctypes
import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mooncake.messages.blocks import BlockKey, block_keys
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier
from mooncake.native import load_or_do_without

_MEDIA = {"GPU": 1, "CPU": 2, "DISK": 4, "STORAGE": 4, "FS": 4}
"""A bit for each medium that a block may be in."""
_TIERS = {Tier.DRAM: 1 | 2, Tier.SSD: 4}
"""The media of each tier: a block in a GPU's memory is at least as near as one in DRAM."""

BlockHash = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


class VllmEvents:
    """Reads the events of one engine, in order. Remembers the blocks that it has."""

    def __init__(self, root: BlockKey, block_size: int) -> None:
        """`root` is the parent key of first blocks, `block_size` is in tokens. Both are those of our
        requests."""
        self._root, self._block_size = root, block_size
        self._keys: dict[BlockHash, BlockKey] = {}
        self._media: dict[BlockHash, int] = {}
        """The media of each block as bits of `_MEDIA`, at least one."""
        self._decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
        self._decode_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode
        self._has_maps = True
        """Whether the last batch had events as maps."""
        self.num_skipped = 0
        """Blocks for which no key could be derived."""

    def __len__(self) -> int:
        """The number of the engine's blocks whose keys are known."""
        return len(self._keys)

    def read(self, payload: bytes) -> list[KVEvent]:
        """The events of one message's payload. Raises `msgspec.MsgspecError` if it is not in this format."""
        events: list[KVEvent] = []
        for event in self._decode(payload).events:
            match event:
                case _Stored():
                    events += self._stored(event)
                case _Removed():
                    events += self._removed(event)
                case _Cleared():
                    self._keys.clear()
                    self._media.clear()
                    events.append(KVCleared())
        return events

    def _decode(self, payload: bytes) -> _MapBatch | _ArrayBatch:
        """Decode a payload as arrays or as maps: versions of vLLM differ in this, an engine always does the
        same."""
        for _ in range(2):
            try:
                return self._decode_maps(payload) if self._has_maps else self._decode_arrays(payload)
            except msgspec.ValidationError:
                self._has_maps = not self._has_maps
        return self._decode_maps(payload)

    def _stored(self, event: _Stored) -> Iterable[KVEvent]:
        medium = _MEDIA.get(event.medium or "GPU")
        if medium is None:
            return
        self._keys.update(zip(event.block_hashes, self._keys_of(event), strict=False))
        known = [block_hash for block_hash in event.block_hashes if block_hash in self._keys]
        self.num_skipped += len(event.block_hashes) - len(known)
        before = [self._media.get(block_hash, 0) for block_hash in known]
        self._media.update(zip(known, [media | medium for media in before], strict=True))
        for tier, media in _TIERS.items():
            if not medium & media:
                continue
            has_none = [not there & media for there in before]
            if new := list(itertools.compress(known, has_none)):
                yield KVStored(tier, [self._keys[block_hash] for block_hash in new])

    def _keys_of(self, event: _Stored) -> Sequence[BlockKey]:
        """The keys of all blocks of an event; none for blocks without tokens, which have only moved to
        another medium."""
        parent = self._root
        if event.parent_block_hash is not None:
            parent = self._keys.get(event.parent_block_hash, b"")
        is_private = event.lora_id is not None or event.lora_name is not None or event.group_idx
        if not parent or is_private or any(event.extra_keys or ()) or event.block_size != self._block_size:
            return ()
        token_ids = _unpacked(bytes(event.token_ids), len(event.block_hashes) * self._block_size)
        return block_keys(token_ids, self._block_size, parent) if token_ids is not None else ()

    def _removed(self, event: _Removed) -> Iterable[KVEvent]:
        medium = _MEDIA.get(event.medium or "GPU", 0)
        gone: dict[Tier, list[BlockKey]] = {tier: [] for tier in Tier}
        for block_hash in event.block_hashes:
            before = self._media.get(block_hash, 0)
            after = before & ~medium
            for tier, media in _TIERS.items():
                if before & media and not after & media:
                    gone[tier].append(self._keys[block_hash])
            if after:
                self._media[block_hash] = after
            elif before:
                del self._keys[block_hash], self._media[block_hash]
        return [KVRemoved(tier, keys) for tier, keys in gone.items() if keys]


def _unpacked(packed: bytes, num_wanted: int) -> "array[int] | None":
    """The token ids in this msgpack array; None unless it has `num_wanted` token ids."""
    native = _native()
    if native is None:
        try:
            token_ids = array("I", msgspec.msgpack.decode(packed, type=list[int]))
        except (msgspec.MsgspecError, OverflowError):
            return None
        return token_ids if len(token_ids) == num_wanted else None
    if num_wanted > len(packed):
        return None
    token_ids = array("I", bytes(4 * num_wanted))
    num_found = native.unpack_token_ids(packed, len(packed), token_ids.buffer_info()[0], num_wanted)
    return token_ids if num_found == num_wanted else None


@functools.cache
def _native() -> ctypes.CDLL | None:
    """The compiled code; None where nothing can be compiled."""
    source = Path(__file__).with_name("token_ids.cpp")
    code = load_or_do_without(source, "vLLM's KV events are read more slowly")
    if code is None:
        return None
    code.unpack_token_ids.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    code.unpack_token_ids.restype = ctypes.c_int64
    return code
