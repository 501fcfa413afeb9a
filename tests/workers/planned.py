"""Chunks of an iteration that a test plans."""

from workers.decode.batching.iterations import PlannedChunk
from workers.decode.sequence import Sequence


def decoded(*sequences: Sequence) -> list[PlannedChunk]:
    """Return a chunk with the next token of each sequence."""
    return [PlannedChunk(sequence, 1, of_prompt=False) for sequence in sequences]
