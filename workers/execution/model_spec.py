"""The translation of a config.json into the engine's model spec.

Owns: this translation. Does not know: the checks (`mooncake.model.config`), the computation.
"""

from collections.abc import Mapping
from typing import Any

from mooncake.model.config import ModelConfig, Rope, read_model_config
from workers.engine.spec import ModelSpec, RopeKind, RopeScaling


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the engine's spec of a parsed config.json. Raises ModelError.

    `config` may also be the `PretrainedConfig.to_dict()` of transformers 4 or 5.
    """
    return spec_of(read_model_config(config))


def spec_of(config: ModelConfig) -> ModelSpec:
    """Return the engine's spec of a checked configuration."""
    implied = config.implied
    has_attention_bias = implied.is_opt or (implied.reads_attention_bias and bool(config.attention_bias))
    rope, (sliding_window, num_full_attention_layers) = config.rope, config.window
    assert rope.rope_theta is not None, "ModelConfig.rope has its theta"
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope.rope_theta,
        rope_scaling=_scaling(rope, config.max_position_embeddings),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=implied.always_has_qkv_bias or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=implied.is_opt or (implied.reads_mlp_bias and bool(config.mlp_bias)),
        qk_norm=implied.has_qk_norm,
        is_opt=implied.is_opt,
        sliding_window=sliding_window,
        num_full_attention_layers=num_full_attention_layers,
    )


def _scaling(rope: Rope, max_position: int) -> RopeScaling:
    match rope.kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(RopeKind.LINEAR, factor=rope.factor or 1.0)
        case "llama3":
            return RopeScaling(
                RopeKind.LLAMA3,
                factor=rope.factor or 1.0,
                low_freq_factor=rope.low_freq_factor or 1.0,
                high_freq_factor=rope.high_freq_factor or 1.0,
                original_max_position=rope.original_max_position_embeddings or max_position,
            )
