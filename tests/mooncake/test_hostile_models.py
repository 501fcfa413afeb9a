"""Models that somebody else has made: each is refused in one line, soon, and without taking much memory."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mooncake.errors import ModelError
from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.tokenizer import load_tokenizer
from tests.tiny_config import CONFIG
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_tokenizer import write_tiny_tokenizer

SHARD = "part-1.safetensors"
MOST_BYTES = 1 << 40
DEPTH = 100_000
GGUF_UINT8, GGUF_STRING, GGUF_ARRAY = 0, 8, 9
NUM_MUTATIONS = 150


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is fine, in every file that is read."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2]}')
    save_file({"lm_head.weight": np.ones((4, 8), np.float32)}, directory / SHARD)
    index = {"weight_map": {"lm_head.weight": SHARD}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def error_of(path: Path) -> str | None:
    """What is wrong with the model, if something is; the tokenizer aside."""
    return _error_of(lambda: open_checkpoint(str(path)))


def tokenizer_error_of(path: Path) -> str | None:
    """What is wrong with the model's tokenizer."""
    checkpoint = open_checkpoint(str(path))
    return _error_of(lambda: load_tokenizer(checkpoint))


def _error_of(read: Callable[[], object]) -> str | None:
    try:
        read()
    except ModelError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    assert len(message) < 1000
    return message


def refusal(path: Path) -> str:
    message = error_of(path)
    assert message is not None
    return message


def tokenizer_refusal(path: Path) -> str:
    message = tokenizer_error_of(path)
    assert message is not None
    return message


def test_the_model_that_is_changed_is_fine(model: Path) -> None:
    assert tokenizer_error_of(model) is None


def deep(opening: str, closing: str) -> str:
    return opening * DEPTH + closing * DEPTH


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, MOST_BYTES)


READ = ("config.json", "generation_config.json", "model.safetensors.index.json", SHARD)
READ_BY_LIBRARIES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", [*READ, *READ_BY_LIBRARIES])
@pytest.mark.parametrize("replace", [fifo, device, dangling, loop, sparse, Path.mkdir])
def test_what_is_no_file_in_place_of_one(model: Path, name: str, replace: Callable[[Path], None]) -> None:
    (model / name).unlink()
    replace(model / name)
    assert name in refusal(model)


@pytest.mark.parametrize("replace", [fifo, device, sparse])
def test_gguf_that_is_no_such_file(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    replace(tmp_path / "m.gguf")
    assert "m.gguf" in refusal(tmp_path / "m.gguf") or replace is device


def test_path_that_leads_nowhere(tmp_path: Path) -> None:
    loop(tmp_path / "loop")
    assert "cannot be looked at" in refusal(tmp_path / "loop")
    assert "cannot be looked at" in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", READ[:3])
@pytest.mark.parametrize(
    "content", [deep("[", "]"), '{"a":' * DEPTH + "1" + "}" * DEPTH, '{"a": 1', "\0" * 1000, "", "[]", "NaN"]
)
def test_json_that_is_none_or_without_end(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    assert str(model) in refusal(model)


@pytest.mark.parametrize("name", READ_BY_LIBRARIES[:2])
@pytest.mark.parametrize("content", [deep("[", "]"), '{"a": 1', "\0" * 1000, "", "[]"])
def test_json_of_the_tokenizer_that_is_none_or_without_end(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    assert str(model) in tokenizer_refusal(model)


def test_json_of_many_bytes(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "x": "x" * (1 << 20)}))
    assert "expected at most" in refusal(model)


@pytest.mark.parametrize("key", sorted({*CONFIG, "num_key_value_heads", "rope_scaling"}))
def test_config_with_a_value_of_another_kind(model: Path, key: str) -> None:
    numbers = (-1, 0, 0.5, 1e300, 10**9, 10**400, True)
    for value in (*numbers, "x", "4", [], ["x"], [[]], {"a": "b"}, {"factor": "x"}):
        (model / "config.json").write_text(json.dumps({**CONFIG, key: value}))
        message = error_of(model)
        if key == "rope_scaling" and value == {"a": "b"}:  # other keys are of no interest
            assert message is None
        else:
            assert message is not None
            assert key in message or "architecture" in message or "dtype" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": "x"},
        {"quantization_config": {"quant_method": ["a\nb"] * 1000}},
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"rms_norm_eps": float("-inf")},
        {"num_attention_heads": 128},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        {"rope_parameters": {"rope_type": {"a": 1}}},
        {"eos_token_id": [2, "x"]},
        {"eos_token_id": -1},
        {"eos_token_id": list(range(1000))},
        {"architectures": {"a": 1}},
        {"architectures": ["a\nb" * 10_000]},
        {"model_type": 5, "architectures": None},
        {"dtype": "a\nb" * 10_000},
        {"layer_types": 5},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": None},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": "x"},
    ],
)
def test_config_that_means_nothing(model: Path, changes: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    refusal(model)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../x"}, {"a": "/etc/passwd"}, {"a": ".."}, {"a": 5}, {"a": None}, [], {}, "x"]
)
def test_index_that_leads_elsewhere(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refusal(model)


@pytest.mark.parametrize(
    "header",
    [
        deep("[", "]"),
        '{"a":' + deep("[", "]") + "}",
        '{"a": {"dtype": "F32", "shape": [-4, -8], "data_offsets": [0, 128]}}',
        '{"a": {"dtype": "F32", "shape": "48", "data_offsets": [0, 128]}}',
        '{"a": {"dtype": ["F32"], "shape": [32], "data_offsets": [0, 128]}}',
        '{"a": {"dtype": "F32", "shape": [32], "data_offsets": ["0", 128]}}',
        '{"a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128, 5]}}',
        '{"a": null}',
        '{"a\\ud800": {"dtype": "F32"}}',
    ],
)
def test_safetensors_header_of_another_kind(model: Path, header: str) -> None:
    content = struct.pack("<Q", len(header)) + header.encode() + bytes(128)
    (model / SHARD).write_bytes(content)
    assert SHARD in refusal(model)


def test_tensor_that_is_more_than_the_model(model: Path) -> None:
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": [MOST_BYTES], "data_offsets": [0, 4 * MOST_BYTES]}}
    ).encode()
    path = model / SHARD
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * MOST_BYTES)
    assert "more than the whole model" in refusal(model)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + content


def raw_gguf(
    path: Path, *entries: tuple[str, int, bytes], num_keys: int | None = None, num_tensors: int = 0
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries) if num_keys is None else num_keys)
    path.write_bytes(
        head + b"".join(string(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    )
    return path


@pytest.mark.parametrize(
    "value",
    [
        array(GGUF_STRING, 1 << 60, string("x")),
        array(GGUF_UINT8, 1 << 60, b"x"),
        array(99, 1, b"x"),
        array(GGUF_ARRAY, 1, array(GGUF_UINT8, 1, b"x")),
        array(GGUF_ARRAY, 1, b"") * DEPTH,
        array(GGUF_STRING, 1, struct.pack("<Q", 1) + b"\xff"),
    ],
)
def test_gguf_array_that_is_none(tmp_path: Path, value: bytes) -> None:
    assert "damaged" in refusal(raw_gguf(tmp_path / "m.gguf", ("a", GGUF_ARRAY, value)))


def test_gguf_that_claims_more_than_it_has_or_has_it_twice(tmp_path: Path) -> None:
    entry = ("a", GGUF_UINT8, b"x")
    assert "claims" in refusal(raw_gguf(tmp_path / "m.gguf", entry, num_keys=1 << 60))
    assert "claims" in refusal(raw_gguf(tmp_path / "m.gguf", entry, num_tensors=1 << 60))
    assert "twice" in refusal(raw_gguf(tmp_path / "m.gguf", entry, entry))


@pytest.mark.parametrize(
    ("kind", "count", "item", "most"),
    [(GGUF_UINT8, 4 << 20, b"\x01", 2), (GGUF_STRING, 1 << 15, string("ab"), 8)],
)
def test_gguf_arrays_take_little_more_memory_than_they_are(
    tmp_path: Path, kind: int, count: int, item: bytes, most: int
) -> None:
    path = raw_gguf(tmp_path / "m.gguf", ("a", GGUF_ARRAY, array(kind, count, item * count)))
    tracemalloc.start()
    try:
        assert "architecture" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < most * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_gguf_of_more_strings_than_any_vocabulary_has(tmp_path: Path) -> None:
    count = 3 << 20
    value = array(GGUF_STRING, count, bytes(8) * count)
    assert "strings" in refusal(raw_gguf(tmp_path / "m.gguf", ("a", GGUF_ARRAY, value)))


@pytest.mark.parametrize("value", ["x", -1.0, float("nan"), [1, 2], ["x"], True])
@pytest.mark.parametrize(
    "key",
    [
        "split__count",
        "llama__expert_count",
        "llama__rope__freq_base",
        "llama__attention__head_count_kv",
        "llama__attention__key_length",
        "llama__rope__scaling__type",
        "tokenizer__ggml__eos_token_id",
    ],
)
def test_gguf_metadata_of_another_kind(tmp_path: Path, key: str, value: object) -> None:
    refusal(write_tiny_gguf(tmp_path / "m.gguf", **{key: value}))


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokens": 5},
        {"tokens": [1, 2]},
        {"merges": 5},
        {"merges": ["a"]},
        {"token_type": ["x"]},
        {"bos_token_id": "x", "add_bos_token": True},
        {"chat_template": 5},
        {"model": 5},
        {"pre": ["x"]},
    ],
)
def test_gguf_tokenizer_of_another_kind(tmp_path: Path, metadata: dict[str, Any]) -> None:
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **metadata}
    keys = {f"tokenizer__ggml__{key}": value for key, value in fields.items() if key != "chat_template"}
    if "chat_template" in fields:
        keys["tokenizer__chat_template"] = fields["chat_template"]
    path = write_tiny_gguf(tmp_path / "m.gguf", **keys)
    assert error_of(path) or tokenizer_error_of(path)


def _long_token(fields: dict[str, Any]) -> None:
    fields["model"]["vocab"]["x" * 100_000] = 511


def _long_added_tokens(fields: dict[str, Any]) -> None:
    token = fields["added_tokens"][0]
    fields["added_tokens"] += [
        {**token, "id": 512 + number, "content": f"{number:01000}"} for number in range(1000)
    ]


def _tokens_around(fields: dict[str, Any], ids: list[int], times: int) -> None:
    special = {"SpecialToken": {"id": "x", "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special] * times + [text],
        "pair": [text, other],
        "special_tokens": {"x": {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}},
    }


def _many_tokens_around(fields: dict[str, Any]) -> None:
    _tokens_around(fields, [1] * 100, 100)


def _unknown_token_around(fields: dict[str, Any]) -> None:
    _tokens_around(fields, [1 << 31], 1)


def _no_tokens(fields: dict[str, Any]) -> None:
    fields["model"] |= {"vocab": {}, "merges": []}
    fields["added_tokens"] = []


def _no_vocabulary(fields: dict[str, Any]) -> None:
    fields["model"]["vocab"] = "x"


def _unknown_model(fields: dict[str, Any]) -> None:
    fields["model"] = {"type": "Magic"}


@pytest.mark.parametrize(
    "change",
    [
        *(_long_token, _long_added_tokens, _many_tokens_around, _unknown_token_around),
        *(_no_tokens, _no_vocabulary, _unknown_model),
    ],
)
def test_tokenizer_that_is_none_or_takes_too_much(
    model: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = model / "tokenizer.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    assert "token" in tokenizer_refusal(model)


@pytest.mark.parametrize("template", [5, {"a": 1}, [5], [{"name": "default", "template": 5}]])
def test_chat_template_that_is_no_text(model: Path, template: object) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    (model / "chat_template.jinja").unlink()
    tokenizer_refusal(model)


# -- mutations --------------------------------------------------------------------------------------------


def mutated(content: bytes, random: Random) -> bytes:
    """`content` with bytes changed, cut out, inserted or said twice, early in it for the most part."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        start = min(int(random.expovariate(1 / 400)), len(data) - 1)
        size = random.choice((1, 1, 4, 8, 64))
        match random.randrange(5):
            case 0:
                data[start] = random.randrange(256)
            case 1:
                data[start : start + size] = random.randbytes(size)
            case 2:
                del data[start : start + size]
            case 3:
                data[start:start] = data[start : start + size]
            case 4:
                data[start : start + 8] = struct.pack(
                    "<Q", random.choice((0, 1 << 31, 1 << 40, (1 << 64) - 1))
                )
    return bytes(data)


@pytest.mark.parametrize("name", ["config.json", SHARD, "model.safetensors.index.json"])
def test_mutated_directory_is_refused_or_opened(model: Path, name: str) -> None:
    content, random = (model / name).read_bytes(), Random(0)
    for _ in range(NUM_MUTATIONS):
        (model / name).write_bytes(mutated(content, random))
        error_of(model)


def test_mutated_gguf_is_refused_or_opened(tmp_path: Path) -> None:
    content, random = write_tiny_gguf(tmp_path / "m.gguf").read_bytes(), Random(0)
    for _ in range(NUM_MUTATIONS):
        (tmp_path / "m.gguf").write_bytes(mutated(content, random))
        error_of(tmp_path / "m.gguf")


def test_mutated_tokenizer_is_refused_or_loaded(model: Path) -> None:
    path = model / "tokenizer.json"
    content, random = path.read_bytes(), Random(0)
    for _ in range(NUM_MUTATIONS // 5):
        path.write_bytes(mutated(content, random))
        tokenizer_error_of(model)
