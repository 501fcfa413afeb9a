"""The directory of a model without weights, for `--load-format dummy`.

Owns: config.json and the tokenizer. Does not know: which model, which server.
"""

import json
from pathlib import Path

from workers.engine.spec import ModelSpec


def write_model(directory: Path, spec: ModelSpec, dtype: str = "bfloat16") -> None:
    """Write a Llama's configuration, and a tokenizer that splits text into bytes and knows every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "torch_dtype": dtype,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols += [f"<{index}>" for index in range(len(symbols), spec.vocab_size)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
