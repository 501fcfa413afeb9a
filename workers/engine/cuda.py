"""The choice of GPU kernels, made without importing Triton where it is not installed.

Owns: the choice. Does not know: how anything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cuda import why_unavailable
from kernels.cuda.launch import FLOATS, MAX_HEAD_DIM
from workers.engine.spec import ModelSpec
from workers.engine.weights import Weights

if TYPE_CHECKING:
    from workers.engine.decode_graphs import DecodeGraphs
    from workers.engine.kvcache.device_kvcache import DeviceKVCache
    from workers.engine.layers.gpu import TritonLayers

_MAX_GROUP = 32
"""The most query heads that may share a KV head: one tile holds all of them, also in float32."""


def unsupported(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why the GPU's kernels cannot compute a model in this dtype; empty if they can."""
    if spec.why_no_kernels:
        return spec.why_no_kernels
    if dtype not in FLOATS:
        return f"{dtype} is not one of {', '.join(map(str, FLOATS))}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is more than {MAX_HEAD_DIM}"
    if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
        return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are more than {_MAX_GROUP}"
    return why_unavailable()


def triton_layers(spec: ModelSpec, weights: Weights) -> TritonLayers:
    """Return the GPU's layers, which take over `weights`. `unsupported` must have returned no reason."""
    from workers.engine.layers.gpu import TritonLayers

    return TritonLayers(spec, weights)


def graph_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes of all graphs that batches of up to `max_batch` need, ascending."""
    from workers.engine.decode_graphs import BUCKETS

    num_smaller = sum(size < max_batch for size in BUCKETS)
    return list(BUCKETS[: num_smaller + 1])


def decode_graphs(layers: TritonLayers, kv: DeviceKVCache) -> DecodeGraphs:
    """Return the graphs of a whole model, none of them captured yet."""
    from workers.engine.decode_graphs import CudaCapture, DecodeGraphs

    return DecodeGraphs(layers, kv, CudaCapture(kv.device))
