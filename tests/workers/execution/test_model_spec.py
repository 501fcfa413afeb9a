"""Reading config.json: what is supported, and what must be refused."""

from typing import Any

import pytest

from mooncake.errors import ModelError
from tests.tiny_models import FAMILIES, tiny_model
from workers.engine.spec import ModelSpec, RopeKind, RopeScaling
from workers.execution.model_spec import model_spec

# As published with Llama-3.2-1B (the keys that matter), in the form of transformers 4.
LLAMA_3_2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_reads_a_published_config_of_transformers_4() -> None:
    spec = model_spec(LLAMA_3_2)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(RopeKind.LLAMA3, 32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
    )


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    rope = {**LLAMA_3_2["rope_scaling"], "rope_theta": 500000.0}
    newer = {**without(LLAMA_3_2, "rope_scaling", "rope_theta"), "rope_parameters": rope}
    assert model_spec(newer) == model_spec(LLAMA_3_2)


def test_absent_keys_mean_what_transformers_assumes() -> None:
    spec = model_spec(without(LLAMA_3_2, "head_dim", "num_key_value_heads", "rope_scaling"))
    assert (spec.head_dim, spec.num_kv_heads, spec.rope_scaling) == (64, 32, RopeScaling())
    mistral = without({**LLAMA_3_2, "architectures": ["MistralForCausalLM"]}, "head_dim")
    assert model_spec(mistral).sliding_window == 4096
    assert model_spec({**mistral, "sliding_window": None}).sliding_window is None
    qwen3 = without({**LLAMA_3_2, "architectures": ["Qwen3ForCausalLM"]}, "head_dim")
    assert model_spec(qwen3).head_dim == 128


def test_qwen_windows_apply_from_max_window_layers_on_and_only_if_enabled() -> None:
    qwen2 = {
        **LLAMA_3_2,
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 100,
        "max_window_layers": 3,
    }
    assert model_spec(qwen2).layer_sliding_window(15) is None
    spec = model_spec({**qwen2, "use_sliding_window": True})
    assert [spec.layer_sliding_window(layer) for layer in (0, 2, 3, 15)] == [None, None, 100, 100]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_config_and_the_object_it_came_from_mean_the_same(family: str) -> None:
    config = tiny_model(family).config
    assert model_spec(config.to_diff_dict()) == model_spec(config.to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported are Llama"),
        ({"architectures": None, "model_type": "phi3"}, "'phi3' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "got 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "got 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "got 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "missing: low_freq_factor, high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "use the unquantised",
        ),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size is None, expected a valid integer"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 8,
            },
            "layer_types must be",
        ),
    ],
)
def test_refuses_what_it_would_compute_wrongly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec({**LLAMA_3_2, **change})


OPT = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim must be hidden_size, 64, got 32"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before is False, expected True"),
        ({"enable_bias": False}, "enable_bias is False"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu', expected 'relu'"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True, expected False"),
        ({"ffn_dim": None}, "ffn_dim is None, expected a valid integer"),
        ({"num_attention_heads": 128}, "head_dim must be positive, got 0"),
    ],
)
def test_refuses_what_opt_may_be_and_is_not_served(change: dict[str, Any], message: str) -> None:
    assert model_spec(OPT).is_opt
    with pytest.raises(ModelError, match=message):
        model_spec({**OPT, **change})


def test_heads_have_an_even_size_only_where_they_are_rotated() -> None:
    with pytest.raises(ModelError, match="head_dim must be even for rotary embeddings, got 63"):
        model_spec({**LLAMA_3_2, "head_dim": None, "hidden_size": 2016})
    assert model_spec({**OPT, "hidden_size": 60}).head_dim == 15
