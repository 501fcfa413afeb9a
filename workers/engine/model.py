"""A decoder-only transformer over a paged KVCache, executed layer by layer.

The arithmetic follows transformers' eager models step by step, in any dtype: token-for-token equality in
float32 is the aim.

Owns: the forward pass of the layers `[a, b)` of one model; models of adjacent ranges form a pipeline (CPP,
Mooncake section 5.1). Does not know: scheduling, transfers, sampling. Callers that load or store KVCache
between layers (section 5.2) write the loop of `forward` themselves.
"""

from collections.abc import Iterable

import torch
from torch.nn.functional import embedding, linear, silu

from kernels.attention import paged_attention
from kernels.kv_copy import write_kv
from workers.engine.batch import Batch
from workers.engine.kvcache import DeviceKVCache
from workers.engine.rotary import rotate
from workers.engine.spec import ModelSpec
from workers.engine.weights import Weights


class DecoderModel:
    """Layers `[layers.start, layers.stop)` of a model; weights are undefined until loaded."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= layers.start < layers.stop <= spec.num_layers or layers.step != 1:
            raise ValueError(f"layers must be a non-empty part of [0, {spec.num_layers}), got {layers}")
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, torch.device(device)
        self._weights = Weights(spec, layers, dtype, self.device)
        self._scale = spec.head_dim**-0.5

    @property
    def is_first_stage(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        return self.layers.stop == self.spec.num_layers

    @torch.inference_mode()
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes (Hugging Face name, tensor) pairs of the whole model or of these layers; casts to the dtype.

        Raises WeightsError for an unknown tensor, a wrong shape, or a tensor that never came.
        """
        self._weights.load(tensors)

    @torch.inference_mode()
    def init_dummy_weights(self, seed: int = 0) -> None:
        """Random weights for tests and benchmarks; a stage gets the same as the whole model would."""
        self._weights.init_dummy(seed)

    @torch.inference_mode()
    def embed(self, batch: Batch) -> torch.Tensor:
        """Hidden states `[T, hidden_size]` of the batch's tokens; first stage only."""
        assert self.is_first_stage, f"layers {self.layers} do not start with the embedding"
        assert self._weights.embedding is not None
        return embedding(batch.token_ids, self._weights.embedding)

    @torch.inference_mode()
    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        """One layer (its number in the whole model) over `hidden` [T, hidden_size]; returns the same shape.

        Writes the batch's keys and values of this layer to their pages; earlier tokens' must be there.
        """
        weights, spec = self._weights.layers[layer], self.spec
        num_rotated = spec.num_heads + spec.num_kv_heads

        normed = _rms_norm(hidden, weights.input_norm, spec.rms_norm_eps)
        qkv = linear(normed, weights.qkv, weights.qkv_bias).view(batch.num_tokens, -1, spec.head_dim)
        qk, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
            queries = _rms_norm(queries, weights.q_norm, spec.rms_norm_eps)
            qk = torch.cat((queries, _rms_norm(keys, weights.k_norm, spec.rms_norm_eps)), dim=1)
        qk = rotate(qk, batch.cos, batch.sin)
        kv_layer = kv.layer(layer)
        write_kv(kv_layer, qk[:, spec.num_heads :], values, batch.page_of_token, batch.offset_of_token)
        plan = batch.plans[spec.layer_sliding_window(layer)]
        attended = paged_attention(qk[:, : spec.num_heads], kv_layer, plan, self._scale)
        hidden = hidden + linear(attended.flatten(1), weights.o, weights.o_bias)

        normed = _rms_norm(hidden, weights.post_norm, spec.rms_norm_eps)
        gate, up = linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        return hidden + linear(silu(gate) * up, weights.down, weights.down_bias)

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """float32 logits `[S, vocab_size]` of `hidden_rows` [S, hidden_size]; last stage only."""
        assert self._weights.final_norm is not None, f"layers {self.layers} do not end with the head"
        assert self._weights.lm_head is not None
        normed = _rms_norm(hidden_rows, self._weights.final_norm, self.spec.rms_norm_eps)
        return linear(normed, self._weights.lm_head).float()

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        """float32 logits `[S, vocab_size]` of each chunk's last token; for an unsplit model."""
        hidden = self.embed(batch)
        for layer in self.layers:
            hidden = self.forward_layer(layer, hidden, batch, kv)
        return self.logits(hidden[batch.last_rows])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension: statistics in float32, the weight applied in x's dtype."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype) * weight
