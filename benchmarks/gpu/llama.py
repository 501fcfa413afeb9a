"""The model whose shapes are measured: Llama-3-8B.

Owns: its sizes. Does not know: its weights, which are random in all measurements.
"""

from workers.engine.spec import ModelSpec

LLAMA_3_8B = ModelSpec(
    "LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rope_theta=500_000.0,
)
