"""Small GGUF files for tests, written with the reference writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 16, 96, 512

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def tiny_tensors(num_layers: int = 2) -> Tensors:
    """Return random float32 tensors with GGUF's names, as llama.cpp would store them. Embeddings are tied."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: Tensors | None = None,
    encoding: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **metadata: Any,
) -> Path:
    """Write a model file of 2 layers, and return `path`.

    `metadata` adds or replaces keys, or removes those whose value is None; in its names `__` stands for `.`.
    Matrices are written in `encoding`, for which the writer must have a quantiser.
    """
    fields: dict[str, Any] = {
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 500000.0,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, values in (tiny_tensors() if tensors is None else tensors).items():
        if values.ndim == 2 and encoding is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(values, encoding), raw_dtype=encoding)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
