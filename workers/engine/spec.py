"""What the engine must know of a model: its shapes and its variants of the decoder layer.

Owns: reading a Hugging Face `config.json` and refusing what the engine would compute wrongly. Does not
know: weights, devices, tokenizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers assumes where a config.json is silent.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_QWEN3_HEAD_DIM = 128


class UnsupportedModel(ValueError):
    """The configuration describes a model that this engine cannot compute."""


class RopeKind(Enum):
    """How rotary frequencies are stretched beyond the length that the model was trained on."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of a `RopeKind`: `factor` for LINEAR and LLAMA3, the others for LLAMA3 only."""

    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Invariants: `num_heads % num_kv_heads == 0`, `head_dim` is even.

    `sliding_window` counts the tokens a query sees, itself included; it applies to the layers from
    `num_full_attention_layers` on (Qwen's `max_window_layers`; 0 elsewhere).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    num_full_attention_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise UnsupportedModel(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0:
            raise UnsupportedModel(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    def layer_sliding_window(self, layer: int) -> int | None:
        """Tokens that a query of `layer` sees, itself included; None if it sees all before it."""
        return self.sliding_window if layer >= self.num_full_attention_layers else None

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Reads a `config.json` (or `PretrainedConfig.to_dict()`), of transformers 4 or 5.

        Raises UnsupportedModel for another architecture, activation, rope kind, attention pattern or a
        quantised checkpoint, and where a size is missing.
        """
        architecture = _architecture(config)
        if config.get("quantization_config"):
            raise UnsupportedModel(
                "expected plain weights (float32, bfloat16, float16), got a checkpoint with "
                "quantization_config; use the unquantised checkpoint"
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModel(f"hidden_act must be 'silu', got {activation!r}")
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        num_layers = _size(config, "num_hidden_layers")
        max_position = _size(config, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(config, max_position)
        is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias")) and architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        default_head_dim = _DEFAULT_QWEN3_HEAD_DIM if is_qwen3 else hidden_size // num_heads
        sliding_window, num_full_attention_layers = _sliding_window(config, architecture, num_layers)
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or default_head_dim),
            max_position=max_position,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias")),
            qk_norm=is_qwen3,
            sliding_window=sliding_window,
            num_full_attention_layers=num_full_attention_layers,
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [_ARCHITECTURE_OF_MODEL_TYPE.get(str(config.get("model_type")))]
    if named[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {named[0] or config.get('model_type')!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return str(named[0])


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config key {key!r} must be a positive integer, got {value!r}")
    return value


def _rope(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling]:
    # transformers 5 keeps theta and scaling in `rope_parameters`; before it, `rope_theta` and `rope_scaling`.
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA)
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name not in [kind.value for kind in RopeKind]:
        raise UnsupportedModel(f"rope type must be one of default, linear, llama3, got {name!r}")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor must be 1.0, got {partial}")
    kind = RopeKind(name)
    required = {
        RopeKind.NONE: (),
        RopeKind.LINEAR: ("factor",),
        RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    }[kind]
    missing = [key for key in required if key not in rope]
    if missing:
        raise UnsupportedModel(
            f"rope type {name!r} needs {', '.join(required)}; missing: {', '.join(missing)}"
        )
    if kind is RopeKind.NONE:
        return theta, RopeScaling()
    if kind is RopeKind.LINEAR:
        return theta, RopeScaling(kind, factor=float(rope["factor"]))
    return theta, RopeScaling(
        kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope.get("original_max_position_embeddings") or max_position),
    )


def _sliding_window(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, int]:
    """(window, number of leading layers without it)."""
    if architecture == "LlamaForCausalLM":
        return None, 0
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    if architecture == "MistralForCausalLM":
        return (None if window is None else int(window)), 0
    if not config.get("use_sliding_window", False) or window is None:
        return None, 0
    layer_types = config.get("layer_types")
    if layer_types is None:
        return int(window), min(num_layers, int(config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)))
    num_full = list(layer_types).count("full_attention")
    if list(layer_types) != ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full):
        raise UnsupportedModel(
            "layer_types must be full_attention layers followed by sliding_attention layers, "
            f"{num_layers} in all, got {list(layer_types)}"
        )
    return int(window), num_full
