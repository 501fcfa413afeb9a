"""What computes on a GPU, found out without importing what is not there, and its first run.

Owns: that choice. Does not know: how anything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cuda import why_unavailable
from kernels.cuda.launch import FLOATS, MAX_HEAD_DIM
from workers.engine.batch import Batch, Chunk
from workers.engine.spec import ModelSpec
from workers.engine.weights import Weights

if TYPE_CHECKING:
    from workers.engine.decode_graphs import DecodeGraphs
    from workers.engine.kvcache import DeviceKVCache
    from workers.engine.model import DecoderModel
    from workers.engine.triton_layers import TritonLayers

_MAX_GROUP = 32
"""query heads of a KV head: a tile holds them all, and float32's are that small"""


def unsupported(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Why the GPU's kernels cannot compute a model; empty if they can."""
    if dtype not in FLOATS:
        return f"{dtype} is not one of {', '.join(map(str, FLOATS))}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is more than {MAX_HEAD_DIM}"
    if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
        return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are more than {_MAX_GROUP}"
    return why_unavailable()


def triton_layers(spec: ModelSpec, weights: Weights) -> TritonLayers:
    """Takes over `weights`; `unsupported` must have been empty."""
    from workers.engine.triton_layers import TritonLayers

    return TritonLayers(spec, weights)


def decode_graphs(layers: TritonLayers, kv: DeviceKVCache) -> DecodeGraphs:
    """For a whole model; captures nothing yet."""
    from workers.engine.decode_graphs import CudaCapture, DecodeGraphs

    return DecodeGraphs(layers, kv, CudaCapture(kv.device))


def warm_up(model: DecoderModel, kv: DeviceKVCache) -> None:
    """Lets kernels be compiled before a request has to wait for it: one prompt, and one step after it.

    A whole model captures its first graph, a stage computes its layers. Blocks for seconds; the pages that it
    uses are free again.
    """
    pages = kv.allocate(1)
    for chunk in (Chunk([0, 0], 0, pages), Chunk([0], 2, pages)):
        batch = Batch.build([chunk], kv)
        if model.is_first_stage and model.is_last_stage:
            model.forward(batch, kv)
        else:
            _compute_stage(model, batch, kv)
    kv.free(pages)


def _compute_stage(model: DecoderModel, batch: Batch, kv: DeviceKVCache) -> None:
    if model.is_first_stage:
        hidden = model.embed(batch)
    else:
        hidden = torch.zeros(batch.num_tokens, model.spec.hidden_size, dtype=model.dtype, device=model.device)
    for layer in model.layers:
        hidden = model.forward_layer(layer, hidden, batch, kv)
    if model.is_last_stage:
        model.logits(hidden[batch.last_rows])
