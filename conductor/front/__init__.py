"""The HTTP front: OpenAI's API on one side, the Conductor and the workers on the other.

Owns: HTTP, validation, chat template and tokenization, block keys, text and stop strings, streams, metrics of
requests. Does not know: where a request runs. The Conductor and workers are reached by messages only.
"""
