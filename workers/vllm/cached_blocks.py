"""The blocks in vLLM's own prefix cache, known from its KV events (version 0.32).

vLLM names blocks by hashes of its own. The key by which our requests find a block is computed here, from the
block's tokens and the key of the previous block. A prompt's first block has the root key in place of the
previous key: `completion_body` salts each prompt with it. A block whose key cannot be computed is left out:
then the Conductor does not know that vLLM has it.

Owns: vLLM's event structs, the order of batches, the key of each hash. Does not know: sockets.
"""

import itertools
import logging
from collections.abc import Sequence

import msgspec

from mooncake.messages.blocks import KEY_BYTES, BlockKey, block_keys
from mooncake.messages.kv_events import KVRemoved, KVStored
from mooncake.messages.pools import Tier

BlockHash = int | bytes
Change = KVStored | KVRemoved
log = logging.getLogger(__name__)


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class CachedBlocks:
    """The cached blocks of one engine, which starts with no blocks and numbers its event batches from 0."""

    def __init__(self, block_size: int) -> None:
        """Begin with no blocks. `block_size` is the number of tokens of a block."""
        self._block_size = block_size
        self._keys: dict[BlockHash, BlockKey] = {}
        self._hashes: dict[BlockKey, BlockHash] = {}
        self.next_sequence = 0
        """The number of the next batch."""

    @property
    def keys(self) -> list[BlockKey]:
        """The block keys of all cached blocks."""
        return list(self._hashes)

    def num_leading_tokens(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of tokens in the leading blocks of `keys` that the engine has."""
        return self._block_size * sum(1 for _ in itertools.takewhile(self._hashes.__contains__, keys))

    def receive(self, sequence: int, payload: bytes) -> list[Change] | None:
        """Apply a batch of events, msgpack-encoded by vLLM, and return the changes.

        If the batch cannot be decoded, all known blocks are dropped.

        Returns:
            The changes; an empty list for a batch that was received before. None if earlier batches are
                missing: they must be replayed or skipped first.
        """
        if sequence > self.next_sequence:
            return None
        if sequence < self.next_sequence:
            return []
        self.next_sequence += 1
        try:
            events = _decode(payload).events
        except (msgspec.MsgspecError, RecursionError) as error:
            log.warning("KV events of vLLM cannot be read: %s", error)
            return self._forget()
        changes: list[Change] = []
        for event in events:
            match event:
                case _BlockStored():
                    changes += self._stored(event)
                case _BlockRemoved():
                    changes += self._removed(event)
                case _AllBlocksCleared():
                    changes += self._forget()
        return changes

    def skip_to(self, sequence: int) -> list[Change]:
        """Give up the batches before `sequence`, which are lost, and drop all known blocks.

        Returns the changes.
        """
        self.next_sequence = sequence
        return self._forget()

    def _stored(self, event: _BlockStored) -> list[Change]:
        root = self._key_before(event)
        num_tokens = len(event.block_hashes) * self._block_size
        if root is None or event.block_size != self._block_size or len(event.token_ids) != num_tokens:
            return []
        keys = block_keys(event.token_ids, self._block_size, root)
        self._keys.update(zip(event.block_hashes, keys, strict=True))
        self._hashes.update(zip(keys, event.block_hashes, strict=True))
        return [KVStored(Tier.DEVICE, keys)]

    def _key_before(self, event: _BlockStored) -> BlockKey | None:
        """Return the key before an event's first block; None if this key is unknown.

        The key is unknown if the parent block's key is unknown, or if the event's blocks depend on more than
        tokens and our salt, as with LoRA. No request of ours can have such blocks.
        """
        if event.lora_name is not None or event.group_idx:
            return None
        first, *others = event.extra_keys or [None]
        if any(others):
            return None
        if event.parent_block_hash is not None:
            return self._keys.get(event.parent_block_hash) if not first else None
        return _root_key(first or [])

    def _removed(self, event: _BlockRemoved) -> list[Change]:
        keys = [self._keys.pop(block_hash) for block_hash in event.block_hashes if block_hash in self._keys]
        for key in keys:
            self._hashes.pop(key, None)
        return [KVRemoved(Tier.DEVICE, keys)] if keys else []

    def _forget(self) -> list[Change]:
        keys = self.keys
        self._keys.clear()
        self._hashes.clear()
        return [KVRemoved(Tier.DEVICE, keys)] if keys else []


def _root_key(extra_keys: list[object]) -> BlockKey | None:
    """Return the root key in a first block's `extra_keys`.

    The root key is the hex `cache_salt` that `completion_body` of `workers/vllm/server.py` gives each prompt.
    Returns None if `extra_keys` are anything else than such a salt.
    """
    match extra_keys:
        case [str(salt)]:
            try:
                root = bytes.fromhex(salt)
            except ValueError:
                return None
            return root if len(root) == KEY_BYTES else None
    return None
