"""From a checkpoint to an executor: what is refused before anything is loaded."""

import json
from pathlib import Path

import pytest

from mooncake.checkpoint import kv_layout, open_checkpoint
from mooncake.config import load_config
from mooncake.errors import ModelError
from mooncake.keys import ClusterKey
from mooncake.messages import Role
from mooncake.process_config import WorkerProcess
from workers.loading import load_executor

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


def test_weights_for_which_there_is_no_memory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    flags = {("load_format",): "dummy", ("kvcache", "device_bytes"): "1GiB", ("worker", "device"): "cpu"}
    process = WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=load_config(None, {}, flags),
        role=Role.DECODE,
        instance="d",
        incarnation=1,
        messenger_socket="",
        num_local_workers=1,
    )
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    with pytest.raises(ModelError, match=r"its weights take \d+\.\d GiB in bfloat16, \d+\.\d GiB of memory"):
        load_executor(checkpoint, kv_layout(checkpoint, 32, "bfloat16"), process)
