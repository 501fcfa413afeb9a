"""The config.json of a tiny model, for tests that do not compute with it."""

from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}
