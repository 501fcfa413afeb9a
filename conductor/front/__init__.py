"""The HTTP front: OpenAI's API on one side, the Conductor and the workers on the other.

Owns: HTTP, validation, chat template and tokenization, block keys, text and stop strings, streams, metrics of
requests. Does not know: where a request runs. It talks to the Conductor and to workers only through messages.
"""
