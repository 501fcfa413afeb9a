"""The architectures that are served, by their class in transformers, and how each computes a decoder layer.

The class of a `config.json` implies properties that the file does not state. The table here states them: an
architecture that computes nothing in a new way needs one more row.

Owns: this table. Does not know: a model's sizes, files, what computes the model.
"""

from dataclasses import dataclass
from enum import Enum, auto


class WindowRule(Enum):
    """The ways in which a `config.json` tells which layers have a sliding window."""

    NEVER = auto()
    ALL_LAYERS = auto()
    """The rule that every layer has the `sliding_window`, if there is one."""
    LATER_LAYERS = auto()
    """The rule that some layers have a window if `use_sliding_window` is true.

    These are the layers from `max_window_layers` on or, with `layer_types`, the layers of sliding attention.
    """


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a class of transformers that a `config.json` does not state."""

    name: str
    model_type: str
    window: WindowRule = WindowRule.NEVER
    always_has_qkv_bias: bool = False
    reads_attention_bias: bool = False
    """Whether `attention_bias` adds biases to q, k, v and o."""
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    is_opt: bool = False
    """Whether layers have LayerNorms and plain MLPs with ReLU and biases, and positions are learned."""
    default_head_dim: int | None = None
    """The size of a head where a `config.json` is silent; None: the hidden size over the number of heads."""
    gguf_interleaves_qk: bool | None = None
    """Whether llama.cpp interleaves the halves of a head in q and k; None: GGUF has no such architecture."""


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "LlamaForCausalLM",
            "llama",
            reads_attention_bias=True,
            reads_mlp_bias=True,
            gguf_interleaves_qk=True,
        ),
        # llama.cpp converts dense Mistral models to GGUF as "llama"; the computation is the same.
        Architecture("MistralForCausalLM", "mistral", WindowRule.ALL_LAYERS),
        Architecture(
            "Qwen2ForCausalLM",
            "qwen2",
            WindowRule.LATER_LAYERS,
            always_has_qkv_bias=True,
            gguf_interleaves_qk=False,
        ),
        Architecture(
            "Qwen3ForCausalLM",
            "qwen3",
            WindowRule.LATER_LAYERS,
            reads_attention_bias=True,
            has_qk_norm=True,
            default_head_dim=128,
            gguf_interleaves_qk=False,
        ),
        Architecture("OPTForCausalLM", "opt", is_opt=True),
    )
}
GGUF_ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in ARCHITECTURES.values()
    if architecture.gguf_interleaves_qk is not None
}
"""The architectures by GGUF's `general.architecture`, which is the model type."""
