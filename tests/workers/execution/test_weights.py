import functools
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mooncake.errors import ModelError
from mooncake.model.checkpoint import open_checkpoint
from tests.tiny_gguf import HEADS, KV_HEADS, tiny_tensors, write_tiny_gguf
from workers.execution.weights import iter_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "vocab_size": 512,
}

WRITTEN_ENCODINGS = {
    "F32": 0.0,
    "F16": 0.001,
    "BF16": 0.005,
    "Q8_0": 0.01,
    "Q5_1": 0.04,
    "Q5_0": 0.05,
    "Q4_1": 0.08,
    "Q4_0": 0.1,
    "MXFP4": 0.15,
}
"""Of GGUF, those that the reference writer can make of floats, and how far off a matrix may come back."""


def write_sharded(directory: Path) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, 8, generator=draw).to(torch.bfloat16) for name in names}
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def load(model: Path, layers: range) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    tensors = iter_weights(
        open_checkpoint(str(model)), layers, lambda done, total: progress.append((done, total))
    )
    return dict(tensors), progress


def permuted_as_llama_cpp_does(weight: Any, num_heads: int) -> Any:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def test_safetensors_come_as_they_are_from_all_files(tmp_path: Path) -> None:
    expected = write_sharded(tmp_path)
    loaded, progress = load(tmp_path, range(3))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert progress == [(64 * count, 64 * 6) for count in range(1, 7)]


def test_only_layers_in_range_and_what_is_outside_layers(tmp_path: Path) -> None:
    expected = write_sharded(tmp_path)
    loaded, progress = load(tmp_path, range(1, 2))
    assert loaded.keys() == expected.keys() - {f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 2)}
    assert progress[-1] == (64 * 4, 64 * 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_rows_are_put_back_in_hf_order_where_llama_cpp_moved_them(
    tmp_path: Path, architecture: str
) -> None:
    original = tiny_tensors() | {"blk.1.attn_q.bias": np.arange(64, dtype=np.float32)}
    stored = dict(original)
    if architecture == "llama":
        for name in original:
            if ".attn_q." in name or ".attn_k." in name:
                num_heads = HEADS if ".attn_q." in name else KV_HEADS
                stored[name] = np.ascontiguousarray(permuted_as_llama_cpp_does(original[name], num_heads))
                assert not np.array_equal(stored[name], original[name])
    loaded, _ = load(write_tiny_gguf(tmp_path / "m.gguf", architecture, tensors=stored), range(2))
    for hf_name, name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight"),
        ("model.layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
    ):
        assert np.array_equal(loaded[hf_name].numpy(), original[name]), name
    assert len(loaded) == len(original)


@pytest.mark.parametrize(("encoding", "relative_error"), WRITTEN_ENCODINGS.items())
def test_gguf_encodings_give_back_what_was_written(
    tmp_path: Path, encoding: str, relative_error: float
) -> None:
    """Root mean square of the error, by that of the weights."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2", encoding=gguf.GGMLQuantizationType[encoding])
    loaded, _ = load(path, range(2))
    for name, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ):
        written = torch.from_numpy(tiny_tensors()[name])
        error = (loaded[ours] - written).square().mean().sqrt() / written.square().mean().sqrt()
        assert error <= relative_error


def test_gguf_rope_factors_are_no_weight(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
    loaded, _ = load(write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors), range(2))
    assert len(loaded) == len(tensors) - 1


def test_gguf_layers_and_progress_of_the_default_model() -> None:
    progress: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(None)
    shapes = {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in iter_weights(checkpoint, range(29, 30), lambda *step: progress.append(step))
    }
    assert len(shapes) == 9 + 2
    assert shapes["model.embed_tokens.weight"] == ((49152, 576), torch.float32)
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == ((192, 576), torch.float32)
    assert "lm_head.weight" not in shapes
    done = [done for done, _ in progress]
    assert done == sorted(done)
    assert progress[-1][0] == progress[-1][1]
    assert 30_000_000 < progress[-1][1] < checkpoint.path.stat().st_size


def test_dummy_has_no_weights(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with pytest.raises(ModelError, match="load_format dummy"):
        iter_weights(open_checkpoint(str(tmp_path), "dummy"), range(3), lambda done, total: None)


def test_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    gguf_path = write_tiny_gguf(tmp_path / "m.gguf")
    for model, damaged in ((tmp_path, tmp_path / "part-1.safetensors"), (gguf_path, gguf_path)):
        checkpoint = open_checkpoint(str(model))
        damaged.write_bytes(damaged.read_bytes()[:-20])
        with pytest.raises(ModelError, match=re.escape(str(damaged))):
            list(iter_weights(checkpoint, range(3), lambda done, total: None))


def test_gguf_encoding_that_cannot_be_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(stored: object, encoding: object) -> None:
        raise NotImplementedError

    checkpoint = open_checkpoint(str(write_tiny_gguf(tmp_path / "m.gguf")))
    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ModelError, match="encoded as F32"):
        list(iter_weights(checkpoint, range(2), lambda done, total: None))


@pytest.mark.cluster
def test_default_model_is_bit_for_bit_what_transformers_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # transformers makes the map of names anew for each module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    checkpoint = open_checkpoint(None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    reference = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=model)["tensors"]
    compared = 0
    for name, tensor in iter_weights(checkpoint, range(30), lambda done, total: None):
        if re.match(r"model\.layers\.(0|17)\.|model\.embed|model\.norm", name):
            assert torch.equal(tensor, reference[name]), name
            compared += 1
    assert compared == 2 * 9 + 2


def test_some_layers_come_without_what_is_outside_all_layers(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    names = [name for name, _ in iter_weights(checkpoint, {1: None}, lambda *_: None, has_ends=False)]
    assert names == ["model.layers.1.mlp.up_proj.weight"]
