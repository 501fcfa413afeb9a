"""Decoder layers by the GPU's kernels.

Nothing here waits for the device, and no layer uploads anything: inputs that the layers share are uploaded
once per batch. With TRITON_INTERPRET=1 (see `kernels.cuda`) the kernels run on the CPU, for tests.

Owns: the operations of a layer, their inputs on the device. Does not know: which layers there are,
scheduling, transfers, graphs.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.functional import embedding, linear

from kernels.cuda.decode_attention import decode_attention, pick_num_splits, pick_part_keys
from kernels.cuda.kv_write import TokenSlots, rotate_and_write
from kernels.cuda.prefill_attention import default_tile, prefill_attention
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.cuda.silu_mul import silu_mul
from kernels.cuda.skinny_linear import DTYPES as SKINNY_DTYPES
from kernels.cuda.skinny_linear import MAX_GATED_ROWS, MAX_ROWS, Norm, has_room, skinny_linear
from kernels.cuda.spans import Spans, plan_spans
from kernels.head_norms import HeadNorms
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec
from workers.engine.upload import upload
from workers.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of all layers of a pass, on the device: tokens, single-token queries, tiles of longer chunks."""

    slots: TokenSlots
    decode: Spans
    prefill: Spans
    num_splits: int
    """The largest number of splits of a decoded sequence."""


class TritonLayers:
    """Decoder layers computed by the GPU's kernels, over weights in their loaded layout, not packed.

    Implements `workers.engine.model.Layers`.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec, self._weights = spec, weights
        self._scale = spec.head_dim**-0.5
        tile = default_tile(weights.dtype, spec.head_dim)
        self._tile_tokens = tile.num_tokens(spec.num_heads // spec.num_kv_heads)
        self._num_sms = _num_sms(weights.device)
        self._has_skinny = weights.dtype in SKINNY_DTYPES and has_room(weights.device)
        windows = (spec.layer_sliding_window(layer) for layer in weights.layers)
        self._window = min((window for window in windows if window is not None), default=None)
        self._inputs: WeakKeyDictionary[Batch, LayerInputs] = WeakKeyDictionary()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None, "these layers do not start with the embedding"
        return embedding(token_ids, self._weights.embedding)

    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        inputs = self._inputs.get(batch)
        if inputs is None:
            inputs = self._inputs[batch] = self._upload(batch)
        return self.compute_layer(layer, hidden, inputs, kv)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_rows).float()

    def num_splits(self, num_queries: int) -> int:
        """Return the largest number of splits of a sequence when `num_queries` sequences are decoded."""
        return pick_num_splits(num_queries, self._spec.num_kv_heads, self._num_sms)

    def part_keys(self, kv_lens: np.ndarray) -> int:
        """Return the number of keys of a split, for decoded sequences of these lengths."""
        num_keys = kv_lens if self._window is None else np.minimum(kv_lens, self._window)
        return pick_part_keys(num_keys, self._spec.num_kv_heads, self._num_sms)

    def compute_layer(
        self, layer: int, hidden: torch.Tensor, inputs: LayerInputs, kv: DeviceKVCache
    ) -> torch.Tensor:
        """Compute a layer over given inputs, and return the hidden states `[T, hidden_size]`."""
        weights, spec, num_tokens = self._weights.layers[layer], self._spec, len(hidden)
        kv_layer, window = kv.layer(layer), spec.layer_sliding_window(layer)
        norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, spec.rms_norm_eps)

        is_skinny = self._is_skinny(hidden)
        if is_skinny:
            norm = Norm(weights.input_norm, spec.rms_norm_eps)
            qkv = skinny_linear(hidden, weights.qkv, weights.qkv_bias, norm=norm)
        else:
            normed = rms_norm(hidden, weights.input_norm, spec.rms_norm_eps)
            qkv = linear(normed, weights.qkv, weights.qkv_bias)
        qkv = qkv.view(num_tokens, -1, spec.head_dim)
        rotate_and_write(qkv, kv_layer, inputs.slots, norms)
        queries = qkv[:, : spec.num_heads]
        attended = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
        if len(inputs.decode):
            decode_attention(
                queries,
                kv_layer,
                inputs.decode,
                self._scale,
                inputs.num_splits,
                attended,
                sliding_window=window,
            )
        if len(inputs.prefill):
            prefill_attention(queries, kv_layer, inputs.prefill, self._scale, attended, sliding_window=window)
        if is_skinny:
            residual = skinny_linear(attended.flatten(1), weights.o, weights.o_bias, hidden)
            norm = Norm(weights.post_norm, spec.rms_norm_eps)
            gated = skinny_linear(residual, weights.gate_up, weights.gate_up_bias, norm=norm, is_gated=True)
            return skinny_linear(gated, weights.down, weights.down_bias, residual)
        residual = linear(attended.flatten(1), weights.o, weights.o_bias)
        normed = add_rms_norm(hidden, residual, weights.post_norm, spec.rms_norm_eps)
        if self._has_skinny and num_tokens <= MAX_GATED_ROWS:
            gated = skinny_linear(normed, weights.gate_up, weights.gate_up_bias, is_gated=True)
        else:
            gated = silu_mul(linear(normed, weights.gate_up, weights.gate_up_bias))
        if weights.down_bias is not None:
            residual += weights.down_bias
        return residual.addmm_(gated, weights.down.t())

    def _is_skinny(self, rows: torch.Tensor) -> bool:
        """Return whether the kernel for few rows computes the products of these rows.

        Such products take no longer than reading the weights.
        """
        return self._has_skinny and len(rows) <= MAX_ROWS

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return logits `[S, vocab_size]` in the model's dtype."""
        assert self._weights.final_norm is not None, "these layers do not end with the head"
        assert self._weights.lm_head is not None
        if self._is_skinny(hidden_rows):
            norm = Norm(self._weights.final_norm, self._spec.rms_norm_eps)
            return skinny_linear(hidden_rows, self._weights.lm_head, norm=norm)
        normed = rms_norm(hidden_rows, self._weights.final_norm, self._spec.rms_norm_eps)
        return linear(normed, self._weights.lm_head)

    def _upload(self, batch: Batch) -> LayerInputs:
        num_pages, _, _, page_size, _ = batch.kv_shape
        plan = plan_spans(
            batch.query_lens, batch.kv_lens, batch.page_tables, num_pages, page_size, self._tile_tokens
        )
        if len(plan.decode):
            plan.decode[:, 4] = self.part_keys(plan.decode[:, 2] + 1)
        decode, prefill, pages = upload((plan.decode, plan.prefill, plan.pages), batch.device)
        return LayerInputs(
            TokenSlots(*batch.cos_sin, batch.page_of_token, batch.offset_of_token),
            Spans(decode, pages),
            Spans(prefill, pages),
            self.num_splits(len(plan.decode)),
        )


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted, one program after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
