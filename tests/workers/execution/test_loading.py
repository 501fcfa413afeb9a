"""From a checkpoint to an executor: what is refused before anything is loaded."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from mooncake.config.settings import load_config
from mooncake.errors import ModelError
from mooncake.messages.workers import Role
from mooncake.model.checkpoint import Checkpoint, kv_layout, open_checkpoint
from mooncake.model.grammar import Vocabulary
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from tests.tiny_tokenizer import IM_END_ID, tiny_backend
from workers.engine.batch import Chunk
from workers.execution import loading
from workers.execution.loading import load_executor

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1 << 10,
    "max_position_embeddings": 128,
    "vocab_size": 1 << 20,
    "torch_dtype": "bfloat16",
}


SMALL = LARGE | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}


def process_of(model: Path, config: dict[str, object], device_bytes: str) -> tuple[Checkpoint, WorkerProcess]:
    """A decode instance with random weights, on the CPU."""
    (model / "config.json").write_text(json.dumps(config))
    flags = {
        ("load_format",): "dummy",
        ("kvcache", "device_bytes"): device_bytes,
        ("worker", "device"): "cpu",
    }
    process = WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=load_config(None, {}, flags),
        role=Role.DECODE,
        instance="d",
        incarnation=1,
        messenger_socket="",
        modules_socket="",
        num_local_workers=1,
    )
    return open_checkpoint(str(model), "dummy"), process


def test_weights_for_which_there_is_no_memory_are_refused(tmp_path: Path) -> None:
    checkpoint, process = process_of(tmp_path, LARGE, "1GiB")
    with pytest.raises(ModelError, match=r"its weights take \d+\.\d GiB in bfloat16, \d+\.\d GiB of memory"):
        load_executor(checkpoint, kv_layout(checkpoint, 32, "bfloat16"), process)


def test_the_first_grammar_does_not_wait_for_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabularies = iter([Vocabulary(tiny_backend(), (IM_END_ID,), 512)])
    monkeypatch.setattr(loading, "load_vocabulary", lambda _: next(vocabularies))
    checkpoint, process = process_of(tmp_path, {**SMALL, "vocab_size": 512}, "1MiB")
    executor = load_executor(checkpoint, kv_layout(checkpoint, 32, "bfloat16"), process)
    assert next(vocabularies, None) is None
    asyncio.run(executor.follow('start: "a"'))


def test_a_damaged_tokenizer_is_told_of_with_the_first_grammar(tmp_path: Path) -> None:
    checkpoint, process = process_of(tmp_path, {**SMALL, "vocab_size": 512, "eos_token_id": 1}, "1MiB")
    (tmp_path / "tokenizer.json").write_text("{")
    executor = load_executor(checkpoint, kv_layout(checkpoint, 32, "bfloat16"), process)
    with pytest.raises(ModelError, match="no tokenizer that can be loaded"):
        asyncio.run(executor.follow('start: "a"'))


def test_freed_layers_are_loaded_from_the_checkpoint_while_it_is_the_same(tmp_path: Path) -> None:
    config = {**SMALL, "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 512}
    checkpoint, process = process_of(tmp_path, config, "1MiB")
    executor = load_executor(checkpoint, kv_layout(checkpoint, 32, "bfloat16"), process)
    model, pages = executor.model, executor.kv.pages.allocate(1)
    batch = executor.prepare([Chunk([5, 6, 7], 0, pages)])
    expected = model.forward(batch, executor.kv)
    model.free_layers(range(1, 3))
    executor.load_freed_layers()
    assert torch.equal(model.forward(batch, executor.kv), expected)
