"""The translation of a GGUF file's metadata and tensor names into Hugging Face's.

Owns: metadata -> config.json form, GGUF tensor names -> Hugging Face names, and the row order that llama.cpp
gives to llama's q and k projections. Does not know: the file format (`gguf_file`), or tokenizers
(`gguf_tokenizer`).

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from pydantic import Field

from mooncake.errors import ModelError, shown
from mooncake.model.architectures import GGUF_ARCHITECTURES
from mooncake.model.config import (
    Fields,
    HeadDim,
    NumHeads,
    NumLayers,
    NumPositions,
    Positive,
    TokenId,
    Width,
    read_fields,
)
from mooncake.model.files import opened
from mooncake.model.gguf_file import GGUFHeader

_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def hf_tensor_name(name: str) -> str | None:
    """Return Hugging Face's name of a GGUF tensor; None for a tensor that is no weight.

    `blk.3.attn_q.weight`, for example, is `model.layers.3.self_attn.q_proj.weight`. An unknown name stays as
    it is, so that the model refuses the tensor.
    """
    if name == _ROPE_FACTORS:
        return None
    if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _GLOBAL_TENSOR.fullmatch(name)) and match[1] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[match[1]]}.{match[2]}"
    return name


def in_hf_row_order(
    header: GGUFHeader, name: str, values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return tensor `name` (GGUF's name; `[rows, columns]` or `[rows]`) with Hugging Face's order of rows.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rotates rows (i, i + head_dim/2).
    """
    architecture = header.metadata["general.architecture"]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in ("attn_q", "attn_k"):
        return values
    if not GGUF_ARCHITECTURES[architecture].gguf_interleaves_qk:
        return values
    num_heads = header.metadata[f"{architecture}.attention.head_count"]
    if match[2] == "attn_k":
        num_heads = header.metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the file's metadata in the form of a Hugging Face config.json.

    Raises ModelError for architectures and features that cannot be expressed exactly.
    """
    path, metadata, tensors = header.path, header.metadata, header.tensors
    architecture = metadata.get("general.architecture")
    known = GGUF_ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if known is None:
        raise ModelError(
            f"{path}: GGUF architecture {shown(architecture)} is not supported;"
            f" use {', '.join(GGUF_ARCHITECTURES)}"
        )
    keys = _keys_of(header, f"{architecture}.")
    if keys.num_parts > 1:
        raise ModelError(
            f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge`"
        )
    if keys.num_experts > 0:
        raise ModelError(f"{path}: mixture-of-experts models are not supported in GGUF")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight; it is not a whole language model")
    head_dim = keys.key_dim or keys.hidden_size // keys.num_heads
    value_dim, rotated_dim = keys.value_dim or head_dim, keys.rotated_dim or head_dim
    if value_dim != head_dim or rotated_dim != head_dim:
        raise ModelError(
            f"{path}: a head has {head_dim} key, {value_dim} value and {rotated_dim} rotated dimensions; "
            "expected equal numbers"
        )
    # Every token that ends an answer: end of sequence, of turn, of message.
    ends = (keys.eos_token_id, keys.eot_token_id, keys.eom_token_id)
    return {
        "architectures": [known.name],
        "model_type": known.model_type,
        "hidden_act": "silu",
        "hidden_size": keys.hidden_size,
        "intermediate_size": keys.intermediate_size,
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads or keys.num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.context_len,
        "rms_norm_eps": _shortest_float32(keys.rms_norm_eps),
        "rope_theta": _shortest_float32(keys.rope_theta),
        "rope_scaling": _rope_scaling(header, keys, head_dim),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": "bfloat16",
        "bos_token_id": keys.bos_token_id,
        "eos_token_id": list(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        "pad_token_id": keys.pad_token_id,
    }


class _Keys(Fields):
    """The metadata of a GGUF file, whose architecture-specific keys are used without their prefix."""

    num_layers: NumLayers = Field(alias="block_count")
    context_len: NumPositions = Field(alias="context_length")
    hidden_size: Width = Field(alias="embedding_length")
    intermediate_size: Width = Field(alias="feed_forward_length")
    num_heads: NumHeads = Field(alias="attention.head_count")
    num_kv_heads: NumHeads | None = Field(None, alias="attention.head_count_kv")
    key_dim: HeadDim | None = Field(None, alias="attention.key_length")
    value_dim: HeadDim | None = Field(None, alias="attention.value_length")
    rms_norm_eps: Positive = Field(alias="attention.layer_norm_rms_epsilon")
    num_experts: int = Field(0, alias="expert_count")
    rotated_dim: HeadDim | None = Field(None, alias="rope.dimension_count")
    rope_theta: Positive = Field(10_000.0, alias="rope.freq_base")
    scaling: str = Field("none", alias="rope.scaling.type")
    scaling_factor: float | None = Field(None, alias="rope.scaling.factor")
    num_parts: int = Field(1, alias="split.count")
    bos_token_id: TokenId | None = Field(None, alias="tokenizer.ggml.bos_token_id")
    eos_token_id: TokenId | None = Field(None, alias="tokenizer.ggml.eos_token_id")
    eot_token_id: TokenId | None = Field(None, alias="tokenizer.ggml.eot_token_id")
    eom_token_id: TokenId | None = Field(None, alias="tokenizer.ggml.eom_token_id")
    pad_token_id: TokenId | None = Field(None, alias="tokenizer.ggml.padding_token_id")


def _keys_of(header: GGUFHeader, prefix: str) -> _Keys:
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items()}
    try:
        return read_fields(_Keys, own)
    except ModelError as error:
        raise ModelError(f"{header.path}: {error}") from None


def _shortest_float32(value: float) -> float:
    """Return the shortest decimal that stands for a float32.

    Metadata's 1e-5, for example, is read as 9.999999747378752e-06.
    """
    return float(str(np.float32(value)))


def _rope_scaling(header: GGUFHeader, keys: _Keys, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, keys.rope_theta, head_dim)
    if keys.scaling == "none":
        return None
    if keys.scaling == "linear" and keys.scaling_factor:
        return {"rope_type": "linear", "factor": keys.scaling_factor}
    prefix = f"{header.metadata['general.architecture']}.rope.scaling"
    found = sorted(key for key in header.metadata if key.startswith(prefix))
    raise ModelError(
        f"{header.path}: rope scaling {shown(keys.scaling)} with {shown(found)} is not supported"
    )


def _llama3_scaling(header: GGUFHeader, rope_theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return Llama 3's scaling, derived from the divisors per frequency that llama.cpp stores.

    Returns None if all divisors are 1. The scaling has four numbers. Three of them are the same in every
    Llama 3 model; the fourth, the factor, is the largest divisor. All divisors are computed again from this
    factor. If they differ from the stored ones, the scaling is of another kind: raises ModelError.
    """
    tensor = header.tensors[_ROPE_FACTORS]
    if tensor.encoding is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{header.path}: {_ROPE_FACTORS} is {tensor.encoding.name} {tensor.shape}, "
            f"expected F32 ({head_dim // 2},)"
        )
    with opened(header.path) as file:
        file.seek(tensor.offset)
        stored = np.frombuffer(file.read(tensor.size_bytes), np.float32).astype(np.float64)
    if np.all(stored == 1.0):
        return None
    if not (np.isfinite(stored).all() and (stored > 0.0).all()):
        raise ModelError(f"{header.path}: {_ROPE_FACTORS} holds what is no positive number")
    factor = float(stored.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelen = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelen - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(
            f"{header.path}: {_ROPE_FACTORS} is not Llama 3's rope scaling; "
            "use the model's Hugging Face directory"
        )
    return scaling
