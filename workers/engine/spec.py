"""The engine's spec of a model: its shapes, and the variant of its decoder layer.

Owns: these facts, and the invariants among them. Does not know: config.json
(`workers.execution.model_spec`), weights, devices, tokenizers.
"""

from dataclasses import dataclass
from enum import Enum


class UnsupportedModel(ValueError):
    """The configuration describes a model that this engine cannot compute."""


class RopeKind(Enum):
    """The kinds of scaling of rotary frequencies beyond the trained length."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of a `RopeKind`: `factor` for LINEAR and LLAMA3, the other fields for LLAMA3 only."""

    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shapes of a decoder-only transformer.

    Invariants: `num_heads % num_kv_heads == 0`; `head_dim` is even where it is rotated.

    `sliding_window` is the number of tokens that a query sees, itself included. It applies to the layers from
    `num_full_attention_layers` on (Qwen's `max_window_layers`; 0 for other models).

    The project's kernels compute every variant that `why_no_kernels` does not name. A new field that they do
    not compute must be named there, or their results are wrong.
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
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    is_opt: bool = False
    """Whether layers are those of OPT instead of Llama's.

    OPT has LayerNorms with biases, with `rms_norm_eps`, instead of RMSNorms; it adds rows for positions to
    the embedding, and does not rotate queries and keys; its MLPs are `relu(x U) D` instead of
    `(silu(x G) * x U) D`.
    """
    sliding_window: int | None = None
    num_full_attention_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise UnsupportedModel(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0 and not self.is_opt:
            raise UnsupportedModel(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def why_no_kernels(self) -> str:
        """The reason why only torch can compute such layers; empty if the project's kernels may do so."""
        needed = f"LayerNorms, learned positions and plain MLPs, which {self.architecture} needs"
        return f"the project's kernels have no {needed}" if self.is_opt else ""

    def layer_sliding_window(self, layer: int) -> int | None:
        """Return the number of tokens that a query of `layer` sees, its own included; None if all."""
        return self.sliding_window if layer >= self.num_full_attention_layers else None
