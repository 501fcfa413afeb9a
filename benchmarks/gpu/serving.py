"""A Llama-3-8B with random weights behind HTTP: one prefill and one decode instance on the one GPU.

Owns: its model directory and flags. Does not know: how requests are measured (`benchmarks/serving.py`).
"""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.layers import LLAMA_3_8B, PAGE_SIZE

_NEEDED = (
    "fastapi",
    "httpx",
    "msgspec",
    "pydantic",
    "tokenizers",
    "transformers",
    "uvicorn",
    "xxhash",
    "zmq",
)
_FLAGS = (
    "--load-format=dummy",
    "--worker-device=cuda:0",
    "--num-prefill=1",
    "--num-decode=1",
    f"--kvcache-block-size={PAGE_SIZE}",
    "--kvcache-device-bytes=16GiB",
    "--kvcache-pool-bytes=8GiB",
)


def serve() -> bool:
    """Prints the tables of `benchmarks/serving.py`; whether it ended well, or could not begin."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"\nserving: not measured, Python has no {', '.join(missing)}")
        return True
    print(
        "\nServing Llama-3-8B (random weights), one prefill and one decode instance on this GPU\n", flush=True
    )
    with tempfile.TemporaryDirectory() as directory:
        _write_model(Path(directory))
        command = [sys.executable, "-m", "benchmarks.serving", f"--model={directory}", *_FLAGS]
        return subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=False).returncode == 0


def _write_model(directory: Path) -> None:
    """A configuration, and a tokenizer that splits text into bytes and has a name for every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec = LLAMA_3_8B
    config = {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope_theta,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols += [f"<{index}>" for index in range(len(symbols), spec.vocab_size)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
