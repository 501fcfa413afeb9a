"""Tiny random models of every supported family, for tests: float32, a fixed seed, a vocabulary of 512."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Larger than a trained model's, so that the next token depends visibly on the context.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# family -> (config class, what differs from _SIZES)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {"head_dim": None}),
    "qwen2_window": (
        "Qwen2Config",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "smollm2": (
        "LlamaConfig",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "opt": (
        "OPTConfig",
        {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    ),
}

FAMILIES = tuple(_FAMILIES)


def random_model(class_name: str, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """Return a random float32 model of transformers, always with the same weights.

    `class_name` is the name of its config class.
    """
    sizes = {key: value for key, value in config.items() if (key, value) != ("head_dim", None)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, class_name)(**sizes), dtype=torch.float32
        ).eval()
        for name, parameter in model.named_parameters():
            # transformers initialises these to constants, which would hide a mistake in them.
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tiny_model(
    family: str, directory: Path | None = None, **changes: float | None
) -> transformers.PreTrainedModel:
    """Return a model of `family` (one of FAMILIES), always with the same weights.

    `changes` are made to its config.json. With a `directory` the model is also written there, in Hugging
    Face's form, with safetensors and without a tokenizer.
    """
    class_name, differences = _FAMILIES[family]
    model = random_model(class_name, {**_SIZES, **differences, **changes})
    if directory is not None:
        model.save_pretrained(directory, safe_serialization=True)
    return model
