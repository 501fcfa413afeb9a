"""The typed contents of a config.json: a model's sizes, and its variants of the decoder layer.

Owns: reading a Hugging Face config.json, and errors that name a key that would be computed wrongly, or whose
value is far too large. Does not know: files, weights, tokenizers, what computes the model.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mooncake.errors import ModelError, shown
from mooncake.messages.blocks import DTYPE_BYTES, KVDtype
from mooncake.messages.costs import ModelShape
from mooncake.model.architectures import ARCHITECTURES, Architecture, WindowRule

RopeType = Literal["default", "linear", "llama3"]

_ROPE_NEEDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

_OPT_NORM_EPS = 1e-5
"""The epsilon of OPT's LayerNorms, which is torch's default."""

# About ten times the sizes of the largest models. Larger values are errors, and would only take memory.
NumLayers = Annotated[int, Field(ge=1, le=1 << 10)]
NumHeads = Annotated[int, Field(ge=1, le=1 << 12)]
HeadDim = Annotated[int, Field(ge=2, le=1 << 12, multiple_of=2)]
Width = Annotated[int, Field(ge=1, le=1 << 20)]
_VocabSize = Annotated[int, Field(ge=1, le=1 << 22)]
NumPositions = Annotated[int, Field(ge=1, le=1 << 27)]
TokenId = Annotated[int, Field(ge=0, le=1 << 22)]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


def _as_list(value: object) -> object:
    if type(value) is int:
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"eos_token_id is {shown(value)}, expected token ids")
    return value


class Fields(BaseModel):
    """Keys of a JSON object, with exactly these types; other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _Names(Fields):
    architectures: list[str] | None = None
    model_type: str | None = None


class GenerationDefaults(Fields):
    """The used part of a generation_config.json or config.json."""

    eos_token_id: Annotated[list[TokenId], BeforeValidator(_as_list), Field(max_length=256)] | None = None
    """The tokens that end an answer."""


class Rope(Fields):
    """The rotary frequencies, with their scaling beyond the trained length."""

    rope_theta: Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    """The older name of `rope_type`."""
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: NumPositions | None = None
    partial_rotary_factor: Positive | None = None

    @property
    def kind(self) -> RopeType:
        """The type of scaling, which the file names under `rope_type` or `type`."""
        name = self.rope_type or self.type or "default"
        for known in _ROPE_NEEDS:
            if name == known:
                return known
        raise ValueError(f"rope type must be one of {', '.join(_ROPE_NEEDS)}, got {shown(name)}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = _ROPE_NEEDS[self.kind]
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(
                f"rope type {self.kind!r} needs {', '.join(needed)}; missing: {', '.join(missing)}"
            )
        if self.kind == "llama3" and not (self.low_freq_factor or 0.0) < (self.high_freq_factor or 0.0):
            raise ValueError(
                f"low_freq_factor must be below high_freq_factor, got {self.low_freq_factor:g} and"
                f" {self.high_freq_factor:g}"
            )
        return self


class ModelConfig(GenerationDefaults):
    """The sizes and variants of a decoder-only transformer of the Llama family.

    Absent keys mean transformers' defaults.
    """

    architecture: str
    """The class of the model in transformers, a name in `ARCHITECTURES`."""
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: NumLayers
    num_attention_heads: NumHeads
    num_key_value_heads: NumHeads | None = None
    head_dim: HeadDim | None = None
    vocab_size: _VocabSize
    max_position_embeddings: NumPositions
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1e-6
    rope_theta: Positive | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    """Theta and scaling in the form of transformers 5; None if the file has the older keys."""
    partial_rotary_factor: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = 4096
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def implied(self) -> Architecture:
        """The properties that the architecture implies."""
        return ARCHITECTURES[self.architecture]

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads; without `num_key_value_heads` it is the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The number of dimensions of a head."""
        default = self.implied.default_head_dim or self.hidden_size // self.num_attention_heads
        return default if self.head_dim is None else self.head_dim

    @property
    def shape(self) -> ModelShape:
        """The sizes that decide the amount of computation."""
        return ModelShape(
            num_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            vocab_size=self.vocab_size,
        )

    @property
    def rope(self) -> Rope:
        """The rotary embedding, with its theta."""
        rope = self.rope_parameters or self.rope_scaling or Rope()
        return rope.model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta or 10_000.0})

    @property
    def native_dtype(self) -> KVDtype:
        """The dtype that the weights were published in."""
        name = (self.dtype or self.torch_dtype or "float32").removeprefix("torch.")
        for known in DTYPE_BYTES:
            if name == known:
                return known
        raise ValueError(
            f"weights of dtype {shown(name)} are not supported; expected {', '.join(DTYPE_BYTES)}"
        )

    @property
    def window(self) -> tuple[int | None, int]:
        """The sliding window in tokens, and the number of leading layers that have no window.

        The value is `(None, 0)` if no layer has a window.
        """
        rule = self.implied.window
        if rule is WindowRule.NEVER or self.sliding_window is None:
            return None, 0
        if rule is WindowRule.LATER_LAYERS and not self.use_sliding_window:
            return None, 0
        if self.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, in which a token sees nothing; expected a positive"
                " number, or null for none"
            )
        if rule is WindowRule.ALL_LAYERS:
            return self.sliding_window, 0
        return self.sliding_window, self._num_full_attention_layers()

    @property
    def num_parameters(self) -> int:
        """The number of parameters, without biases and norms."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        num_matrices = 2 if self.implied.is_opt else 3
        layer = attention + num_matrices * self.hidden_size * self.intermediate_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        if self.implied.is_opt:
            embeddings += (self.max_position_embeddings + 2) * self.hidden_size
        return self.num_hidden_layers * layer + embeddings

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_size < 1:
            raise ValueError(f"head_dim must be positive, got {self.head_size}")
        if self.head_size % 2 and not self.implied.is_opt:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_size}")
        partial = self.rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        if not math.isclose(partial, 1.0):
            raise ValueError(f"partial_rotary_factor must be 1.0, got {partial:g}")
        # These properties raise ValueError for values that are not supported.
        _ = self.window, self.native_dtype
        if self.quantization_config:
            method = self.quantization_config.get("quant_method")
            raise ValueError(
                f"quantized safetensors ({shown(method)}) are not supported; use the unquantised checkpoint"
                " or a GGUF file"
            )
        return self

    def _num_full_attention_layers(self) -> int:
        """Return how many leading layers of a Qwen model have no window (`max_window_layers`)."""
        num_layers, types = self.num_hidden_layers, self.layer_types
        if types is None:
            return min(num_layers, self.max_window_layers)
        num_full = types.count("full_attention")
        if types != ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full):
            raise ValueError(
                "layer_types must be full_attention layers followed by sliding_attention layers, "
                f"{num_layers} in all, got {shown(types)}"
            )
        return num_full


FieldsType = TypeVar("FieldsType", bound=Fields)


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the checked configuration of a config.json.

    The architecture is read first, as the keys depend on it. Raises ModelError that names the first wrong
    key, the value and what was expected.
    """
    names = read_fields(_Names, config)
    implied = next(
        (known.name for known in ARCHITECTURES.values() if known.model_type == names.model_type), None
    )
    named = names.architectures[0] if names.architectures else implied
    if named not in ARCHITECTURES:
        raise ModelError(
            f"architecture {shown(named or names.model_type)} is not supported; supported are"
            f" {', '.join(ARCHITECTURES)} (config.json: architectures, model_type)"
        )
    if ARCHITECTURES[named].is_opt:
        config = _as_llama(config)
    return read_fields(ModelConfig, {**config, "architecture": named})


class _OptFields(Fields):
    """The keys that an OPT configuration has instead of Llama's."""

    ffn_dim: Width
    hidden_size: Width
    word_embed_proj_dim: Width | None = None
    activation_function: Literal["relu"] = "relu"
    do_layer_norm_before: Literal[True] = True
    enable_bias: Literal[True] = True
    layer_norm_elementwise_affine: Literal[True] = True
    keeps_no_final_layer_norm: Literal[False] = Field(False, alias="_remove_final_layer_norm")
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise ValueError(
                f"word_embed_proj_dim must be hidden_size, {self.hidden_size}, got {self.word_embed_proj_dim}"
            )
        return self


def _as_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OPT configuration under Llama's keys. Raises ModelError."""
    fields = read_fields(_OptFields, config)
    return {
        **config,
        "intermediate_size": fields.ffn_dim,
        "rms_norm_eps": _OPT_NORM_EPS,
        "tie_word_embeddings": fields.tie_word_embeddings,
        "head_dim": None,
        "num_key_value_heads": None,
    }


def read_fields(kind: type[FieldsType], values: Mapping[str, Any]) -> FieldsType:
    """Return `values` parsed as a `kind`. Raises ModelError that names the first wrong key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        raise ModelError(message)
    if first["type"] == "missing":
        raise ModelError(f"{'.'.join(map(str, first['loc']))} is missing; expected a positive number")
    key = ".".join(map(str, first["loc"]))
    expected = message.removeprefix("Input should be ")
    raise ModelError(f"{key} is {shown(first['input'])}, expected {expected}")
