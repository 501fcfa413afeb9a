"""KVCache blocks: their names (chained keys) and their bytes (layout).

A block is `block_size` consecutive tokens of every layer (Mooncake, section 3 and Figure 3). Its key
covers all tokens before it, so equal keys mean equal prefixes. Only full blocks have keys; a prompt's
partial last block is private to its request.

Owns: key derivation and the layout arithmetic. Does not know: where a block is stored.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from mooncake.messages.quantities import Count

KEY_BYTES = 16
_MOST_ROOTS = 1024
"""Root keys that are cached: every request asks for the key of its model and tenant."""
BlockKey = bytes
KVDtype = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of one block: `[layer][kv_head][K, V][token][head_dim]`, contiguous, in `dtype`.

    One layer of a block is one byte range (layer-wise streaming); adjacent heads of a layer are one byte
    range (tensor-parallel resharding). A stage of a pipeline (Mooncake, section 5.1) has shards of
    `num_layers` layers, from layer `first_layer` of the model on. A rank of a tensor-parallel group has
    shards of `num_kv_heads` heads, from head `first_head` on.
    """

    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    block_size: Count
    dtype: KVDtype
    first_layer: Count = 0
    first_head: Count = 0

    def __post_init__(self) -> None:
        if (
            min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size) < 1
            or min(self.first_layer, self.first_head) < 0
        ):
            raise ValueError(f"no KV layout: each of its sizes must be at least 1, got {self}")

    @property
    def layers(self) -> range:
        """The layers of this shard, numbered as in the model."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        """The KV heads of this shard, numbered as in the model."""
        return range(self.first_head, self.first_head + self.num_kv_heads)

    def of_layers(self, layers: range) -> "KVLayout":
        """Return the layout of the shard with these layers of the model.

        Raises ValueError for an empty range.
        """
        return msgspec.structs.replace(self, first_layer=layers.start, num_layers=len(layers))

    def of_heads(self, heads: range) -> "KVLayout":
        """Return the layout of the shard with these heads of the model.

        Raises ValueError for an empty range.
        """
        return msgspec.structs.replace(self, first_head=heads.start, num_kv_heads=len(heads))

    def positions(self, layers: range) -> range:
        """Return the positions of the model's `layers` in this shard.

        Raises ValueError if the shard lacks some.
        """
        return _positions(layers, self.layers, "layers")

    def head_positions(self, heads: range) -> range:
        """Return the positions of the model's `heads` in each layer of this shard.

        Raises ValueError if the shard lacks some.
        """
        return _positions(heads, self.heads, "heads")

    @property
    def head_bytes(self) -> int:
        """The bytes of one head of one layer of one block, which are contiguous."""
        return self.block_size * 2 * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of one block, over all heads of this shard."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of one block, over all layers of this shard."""
        return self.num_layers * self.layer_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens occupy, the partial last one included."""
        return -(-num_tokens // self.block_size)


def common(ours: range, theirs: range) -> range:
    """Return the layers, or heads, that are in both ranges; the result may be empty."""
    start = max(ours.start, theirs.start)
    return range(start, max(start, min(ours.stop, theirs.stop)))


def _positions(wanted: range, there: range, what: str) -> range:
    if not (wanted and wanted.start in there and wanted[-1] in there):
        raise ValueError(
            f"{what} [{wanted.start}, {wanted.stop}) are no part of [{there.start}, {there.stop})"
        )
    return range(wanted.start - there.start, wanted.stop - there.start)


@lru_cache(_MOST_ROOTS)
def root_key(fingerprint: str, cache_salt: str = "", adapter_digest: str = "") -> BlockKey:
    """Return the parent key of every first block: 16 bytes.

    Models, LoRA adapters and tenants with different root keys never share a block.

    `adapter_digest` is the hexadecimal digest of an adapter's weights; empty without one.
    """
    model = f"mooncake-root-adapter\0{adapter_digest}" if adapter_digest else "mooncake-root"
    return hashlib.sha256(f"{model}\0{fingerprint}\0{cache_salt}".encode()).digest()[:KEY_BYTES]


def client_salt(cache_salt: str | None) -> str:
    """Return the salt for `root_key` of a client without an API key.

    No `cache_salt` makes this salt equal to the salt of an API key.
    """
    return f"salt:{cache_salt}" if cache_salt else ""


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Return the keys of the full blocks of `token_ids`: key = SHA-256(parent key, token ids)[:16].

    Token ids are hashed as little-endian uint32.
    """
    keys: list[BlockKey] = []
    parent = root
    data = memoryview(array("I", token_ids)).cast("B")
    stride = 4 * block_size
    for start in range(0, len(token_ids) // block_size * stride, stride):
        parent = hashlib.sha256(parent + data[start : start + stride]).digest()[:KEY_BYTES]
        keys.append(parent)
    return keys


def extended_keys(
    known: list[BlockKey], token_ids: Sequence[int], block_size: int, root: BlockKey
) -> list[BlockKey]:
    """Return the keys of the full blocks of `token_ids`. The first of these keys are `known`."""
    parent = known[-1] if known else root
    return known + block_keys(token_ids[len(known) * block_size :], block_size, parent)


def model_fingerprint(architecture: str, weights_digest: str, dtype: KVDtype, layout: KVLayout) -> str:
    """Return the fingerprint of a model. Instances exchange blocks only if their fingerprints are equal.

    The fingerprint describes the whole model, not its split, so prefill and decode may be split differently:
    `layout` must be that of the whole model.
    """
    assert layout.first_layer == layout.first_head == 0, "a shard has its model's fingerprint"
    layout_text = msgspec.json.encode(layout).decode()
    text = f"mooncake-model-1\0{architecture}\0{weights_digest}\0{dtype}\0{layout_text}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
