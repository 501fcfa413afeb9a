"""Decoder layers in torch, on any device and in any dtype: the reference, and the fallback without kernels.

The arithmetic follows transformers' eager models step by step.

Owns: the operations of a layer. Does not know: which layers there are, scheduling, transfers.
"""

import torch
from torch.nn.functional import embedding, layer_norm, linear, relu, silu

from kernels.attention import paged_attention
from kernels.kv_copy import write_kv
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.rotary import rotate
from workers.engine.spec import ModelSpec
from workers.engine.weights import Weights


class TorchLayers:
    """Decoder layers computed by torch, over weights in the layout in which they were loaded, not packed.

    Implements `workers.engine.model.Layers` and `RankLayers`.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec, self._weights = spec, weights
        self._num_heads, self._num_kv_heads = len(weights.part.heads), len(weights.part.kv_heads)
        self._scale = spec.head_dim**-0.5

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None, "these layers do not start with the embedding"
        return embedding(token_ids, self._weights.embedding)

    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        hidden = hidden + self.attention(layer, hidden, batch, kv)
        return hidden + self.mlp(layer, hidden, batch)

    def attention(self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        """Return the output of attention, without the residual. Keys and values are written to their pages.

        `hidden` and the result: `[num_tokens, hidden_size]`, of the weights' dtype. With a rank's part of the
        weights, the result is the rank's summand of the output.
        """
        weights, spec = self._weights.layers[layer], self._spec
        num_heads, num_rotated = self._num_heads, self._num_heads + self._num_kv_heads
        normed = self._norm(hidden, weights.input_norm, weights.input_norm_bias)
        qkv = linear(normed, weights.qkv, weights.qkv_bias).view(batch.num_tokens, -1, spec.head_dim)
        qk, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = qk[:, :num_heads], qk[:, num_heads:]
            queries = _rms_norm(queries, weights.q_norm, spec.rms_norm_eps)
            qk = torch.cat((queries, _rms_norm(keys, weights.k_norm, spec.rms_norm_eps)), dim=1)
        if not spec.is_opt:
            qk = rotate(qk, *batch.rotation)
        kv_layer = kv.layer(layer)
        write_kv(kv_layer, qk[:, num_heads:], values, batch.page_of_token, batch.offset_of_token)
        plan = batch.plan(spec.layer_sliding_window(layer))
        attended = paged_attention(qk[:, :num_heads], kv_layer, plan, self._scale)
        return linear(attended.flatten(1), weights.o, weights.o_bias)

    def mlp(self, layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output of the MLP, without the residual, in the shapes of `attention`."""
        weights = self._weights.layers[layer]
        normed = self._norm(hidden, weights.post_norm, weights.post_norm_bias)
        inner = linear(normed, weights.gate_up, weights.gate_up_bias)
        if self._spec.is_opt:
            inner = relu(inner)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = silu(gate) * up
        return linear(inner, weights.down, weights.down_bias)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        assert self._weights.final_norm is not None, "these layers do not end with the head"
        assert self._weights.lm_head is not None
        normed = self._norm(hidden_rows, self._weights.final_norm, self._weights.final_norm_bias)
        return linear(normed, self._weights.lm_head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Normalize over the last dimension. `x` and the result have the weights' dtype."""
        if self._spec.is_opt:
            return layer_norm(x, weight.shape, weight, bias, self._spec.rms_norm_eps)
        return _rms_norm(x, weight, self._spec.rms_norm_eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize over the last dimension: statistics in float32, the weight applied in x's dtype."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype) * weight
