import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake.errors import ModelError
from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.gguf_model import hf_tensor_name
from tests.tiny_gguf import HEAD_DIM, HIDDEN, VOCAB, tiny_tensors, write_tiny_gguf


def config_of(path: Path) -> dict[str, Any]:
    return open_checkpoint(str(path)).config


def llama3_factors(factor: float) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What llama.cpp's converter writes as rope_freqs.weight for Llama 3 (original context 8192)."""
    factors = []
    for dim in range(0, HEAD_DIM, 2):
        wavelen = 2 * math.pi * 500000.0 ** (dim / HEAD_DIM)
        if wavelen < 8192 / 4.0:
            factors.append(1.0)
        elif wavelen > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelen - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("architecture", "hf_class"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_each_architecture_has_its_hf_class(tmp_path: Path, architecture: str, hf_class: str) -> None:
    config = config_of(write_tiny_gguf(tmp_path / "m.gguf", architecture))
    assert config["architectures"] == [hf_class]
    assert (config["num_hidden_layers"], config["rope_theta"], config["rms_norm_eps"]) == (2, 500000.0, 1e-5)
    assert (config["vocab_size"], config["head_dim"]) == (VOCAB, HEAD_DIM)


def test_head_is_tied_unless_there_is_an_output_tensor(tmp_path: Path) -> None:
    assert config_of(write_tiny_gguf(tmp_path / "tied.gguf"))["tie_word_embeddings"] is True
    tensors = tiny_tensors() | {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    assert (
        config_of(write_tiny_gguf(tmp_path / "untied.gguf", tensors=tensors))["tie_word_embeddings"] is False
    )


def test_all_end_tokens_end_an_answer(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=5, tokenizer__ggml__eot_token_id=9
    )
    assert open_checkpoint(str(path)).eos_token_ids == (5, 9)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_stored_factors(tmp_path: Path, factor: float) -> None:
    tensors = tiny_tensors() | {"rope_freqs.weight": llama3_factors(factor)}
    assert config_of(write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_stored_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_factors(8.0)
    factors[2] *= 1.5
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=tiny_tensors() | {"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="not Llama 3's rope scaling"):
        open_checkpoint(str(path))


def test_rope_scaling_metadata_is_expressed_or_refused(tmp_path: Path) -> None:
    linear: dict[str, Any] = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    path = write_tiny_gguf(tmp_path / "linear.gguf", **linear)
    assert config_of(path)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    path = write_tiny_gguf(tmp_path / "other.gguf", llama__rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="'longrope'"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"llama__block_count": None}, "block_count is missing"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama__attention__head_count": [4, 4]}, "head_count"),
        ({"llama__rope__dimension_count": 8}, "8 rotated dimensions"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"split__count": 3}, "one part of a split"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    tmp_path: Path, metadata: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        open_checkpoint(str(write_tiny_gguf(tmp_path / "m.gguf", **metadata)))


def test_unknown_tensor_keeps_its_name_so_that_the_model_refuses_it() -> None:
    assert hf_tensor_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert hf_tensor_name("output.weight") == "lm_head.weight"
    assert hf_tensor_name("blk.3.attn_sub_norm.weight") == "blk.3.attn_sub_norm.weight"
    assert hf_tensor_name("rope_freqs.weight") is None
