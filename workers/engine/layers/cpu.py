"""Decoder layers by the CPU's own kernels: packed weights, attention over pages without copies.

A row of the result depends neither on the other rows nor on how its sequence was cut into chunks, bit for
bit.

Owns: the packed weights. Does not know: which layers there are, scheduling, transfers.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding

from kernels.cpu.attention import HEAD_DIMS, AttentionShape, PagedAttention
from kernels.cpu.elementwise import MULTIPLE, Elementwise
from kernels.cpu.layer import Layer, PackedLayerWeights, run_layers
from kernels.cpu.library import DTYPES, Library
from kernels.cpu.linear import GatedLinear, PackedLinear
from kernels.cpu.memory import HugeMemory, give_back, give_back_all
from kernels.head_norms import HeadNorms
from workers.engine import weights as plain
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec


def unsupported(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why the CPU's kernels cannot compute a model in this dtype; empty if they can."""
    if spec.why_no_kernels:
        return spec.why_no_kernels
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.hidden_size % MULTIPLE or spec.intermediate_size % MULTIPLE:
        return f"hidden or intermediate size is not a multiple of {MULTIPLE}"
    return ""


class CpuLayers:
    """Decoder layers computed by the CPU's kernels.

    Implements `workers.engine.model.Layers` and `RankLayers`. Takes the weights out of `weights`, so that
    they are not held twice.
    """

    def __init__(self, library: Library, spec: ModelSpec, weights: plain.Weights) -> None:
        self._library, self._spec = library, spec
        self._memory = HugeMemory()
        num_heads, num_kv_heads = len(weights.part.heads), len(weights.part.kv_heads)
        self._heads = AttentionShape(num_heads, num_kv_heads, spec.head_dim, spec.head_dim**-0.5)
        self._elementwise = Elementwise(library, weights.dtype)
        self._layers: dict[int, Layer] = {}
        self.load_layers(weights)
        self._final_norm = weights.final_norm
        self._head = None if weights.lm_head is None else self._linear(weights.lm_head, None)
        is_tied = weights.embedding is weights.lm_head
        self._embedding = None if is_tied else weights.embedding

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's matrices, the same for all layers."""
        return sum(packed.nbytes for packed in next(iter(self._layers.values())).packed)

    def load_layers(self, weights: plain.Weights) -> None:
        """Take the layers out of `weights`, whose memory goes back to the system."""
        for layer in list(weights.layers):
            plain_layer = weights.layers.pop(layer)
            self._layers[layer] = self._pack(plain_layer)
            for matrix in (plain_layer.qkv, plain_layer.o, plain_layer.gate_up, plain_layer.down):
                give_back(matrix)  # malloc would keep it

    def free_layers(self, layers: range) -> None:
        """Return the memory of consecutive layers to the system.

        No computation may use these layers until `load_layers` has loaded them again.
        """
        freed = [self._layers.pop(layer) for layer in layers]
        give_back_all(packed for layer in freed for packed in layer.packed)

    def _pack(self, weights: plain.LayerWeights) -> Layer:
        norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, self._spec.rms_norm_eps)
        packed = PackedLayerWeights(
            weights.input_norm,
            self._linear(weights.qkv, weights.qkv_bias),
            norms,
            self._linear(weights.o, weights.o_bias),
            weights.post_norm,
            GatedLinear(self._library, *self._halves(weights.gate_up, weights.gate_up_bias)),
            self._linear(weights.down, weights.down_bias),
            self._spec.rms_norm_eps,
        )
        return Layer(self._library, packed, self._heads)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return PackedLinear(self._library, weight, bias, self._memory)

    def _halves(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[PackedLinear]:
        biases = (None, None) if bias is None else bias.chunk(2)
        for half, half_bias in zip(weight.chunk(2), biases, strict=True):
            yield self._linear(half, half_bias)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is not None:
            return embedding(token_ids, self._embedding)
        assert self._head is not None, "these layers do not start with the embedding"
        return self._head.rows(token_ids)

    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        return self.forward_layers(range(layer, layer + 1), hidden, batch, kv)

    def forward_layers(
        self, layers: range, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        """Compute consecutive layers in one call. Returns hidden states `[T, hidden_size]`.

        Raises HelperLost if a helper that has some of the heads or pages is lost.
        """
        heads, helped = self._heads, None
        if kv.moved is not None:
            helped = kv.moved.owner
            heads = heads.without(helped.shape.heads)
            helped.begin(layers, batch.query_lens, batch.kv_lens, batch.page_tables, batch.page_size)
        elif kv.hosted_pages is not None and (hosted := batch.hosted) is not None:
            helped = kv.hosted_pages.owner
            query_lens, kv_lens, tables, tokens = hosted
            helped.begin(layers, query_lens, kv_lens, tables, batch.page_size, tokens)
        of_pass = [
            (self._layers[layer], kv.layer(layer), self._attention(layer, batch, heads)) for layer in layers
        ]
        workspace = batch.workspace(of_pass[0][0].workspace_elements)
        return run_layers(of_pass, hidden, batch.slots, workspace, helped, kv.owner)

    def attention(self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        """Return the output of attention `[T, hidden_size]`, without the residual `hidden`.

        Keys and values are written to their pages.
        """
        computed, attention = self._layers[layer], self._attention(layer, batch, self._heads)
        workspace = batch.workspace(computed.workspace_elements)
        return computed.attention_half(hidden, kv.layer(layer), attention, batch.slots, workspace)

    def mlp(self, layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output of the MLP `[T, hidden_size]`, without the residual `hidden`."""
        computed = self._layers[layer]
        return computed.mlp_half(hidden, batch.workspace(computed.workspace_elements))

    def _attention(self, layer: int, batch: Batch, heads: AttentionShape) -> PagedAttention:
        return batch.attention(self._library, heads, self._spec.layer_sliding_window(layer))

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        assert self._final_norm is not None, "these layers do not end with the head"
        assert self._head is not None
        normed = self._elementwise.rms_norm(hidden_rows, self._final_norm, self._spec.rms_norm_eps)
        return self._head(normed, out_dtype=torch.float32)
