"""`mooncake-serve` with slowed workers: a tiny model whose passes take the time of a larger one.

    python -m benchmarks.overload.slowed MODEL_FOLDER [mooncake-serve flags]

With such workers, several instances of both roles share a small machine without competing for its cores. The
server is unchanged, except that the device waits after each pass (`slowed_worker`).

Owns: the model in a folder, the choice of the workers' module. Does not know: the durations of passes.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mooncake.cli.main import main
from mooncake.node import plan as node

SLOW_WORKER = "benchmarks.overload.slowed_worker"
VOCAB_SIZE = 256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> None:
    """Write a model without weights, which the server draws at random. Its tokens are bytes."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def use_slow_workers() -> None:
    """Make the nodes that this process supervises start slowed workers."""
    child_spec: Any = node.ChildSpec

    def with_slow_worker(name: str, module: str, *arguments: Any, **options: Any) -> Any:
        return child_spec(
            name, SLOW_WORKER if module == "workers.process.service" else module, *arguments, **options
        )

    node.ChildSpec = with_slow_worker  # type: ignore[misc, assignment]


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    write_model(folder)
    sys.argv += [f"--model={folder}", "--load-format=dummy"]
    use_slow_workers()
    main()
