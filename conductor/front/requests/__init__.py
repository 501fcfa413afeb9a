"""The reading of requests: from a body's bytes to token ids, sampling parameters and grammars."""
