"""Files of a model: configuration, weights, GGUF, tokenizer, grammars over its vocabulary."""
