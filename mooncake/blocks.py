"""KVCache blocks: their names (chained keys) and their bytes (layout).

A block is `block_size` consecutive tokens of every layer (Mooncake, section 3 and Figure 3). Its key
covers all tokens before it, so equal keys mean equal prefixes. Only full blocks have keys; a prompt's
partial last block is private to its request.

Owns: key derivation and the layout arithmetic. Does not know: where a block is stored.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

KEY_BYTES = 16
BlockKey = bytes
KVDtype = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True):
    """The bytes of one block: `[layer][kv_head][K, V][token][head_dim]`, contiguous, in `dtype`.

    One layer of a block is one byte range (layer-wise streaming); adjacent heads of a layer are one
    byte range (tensor-parallel resharding). A stage of a pipeline (Mooncake, section 5.1) has the shards of
    blocks that hold its own layers, `num_layers` from `first_layer` of the model on.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype
    first_layer: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size) < 1
            or self.first_layer < 0
        ):
            raise ValueError(f"no KV layout: each of its sizes must be at least 1, got {self}")

    @property
    def layers(self) -> range:
        """Those of the model."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def of_layers(self, layers: range) -> "KVLayout":
        """The shard with these layers of the model. Raises ValueError if there are none of them."""
        return msgspec.structs.replace(self, first_layer=layers.start, num_layers=len(layers))

    def positions(self, layers: range) -> range:
        """Where `layers` of the model are in this shard. Raises ValueError if they are not all there."""
        if not (layers and layers.start in self.layers and layers[-1] in self.layers):
            raise ValueError(
                f"layers [{layers.start}, {layers.stop}) are no part of"
                f" [{self.layers.start}, {self.layers.stop})"
            )
        return range(layers.start - self.first_layer, layers.stop - self.first_layer)

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer, all heads."""
        return self.num_kv_heads * 2 * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """One layer of one block."""
        return self.block_size * self.token_layer_bytes

    @property
    def block_bytes(self) -> int:
        """All layers of one block."""
        return self.num_layers * self.layer_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the partial last one included."""
        return -(-num_tokens // self.block_size)


def root_key(fingerprint: str, cache_salt: str = "") -> BlockKey:
    """The parent of every first block. Models and tenants with different roots can never share a block."""
    return hashlib.sha256(f"mooncake-root\0{fingerprint}\0{cache_salt}".encode()).digest()[:KEY_BYTES]


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, in order: key = SHA-256(parent key, token ids)[:16].

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


def model_fingerprint(architecture: str, weights_digest: str, dtype: KVDtype, layout: KVLayout) -> str:
    """Identity of what a KV byte means: two instances may exchange blocks only if theirs are equal.

    Describes the whole model, never how it is split, so prefill and decode may be split differently.
    """
    layout_text = msgspec.json.encode(layout).decode()
    text = f"mooncake-model-1\0{architecture}\0{weights_digest}\0{dtype}\0{layout_text}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
