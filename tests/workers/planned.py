"""Chunks of an iteration, as a test plans them."""

from workers.decode.batching.iterations import PlannedChunk
from workers.decode.sequence import Sequence


def decoded(*sequences: Sequence) -> list[PlannedChunk]:
    """The next token of each."""
    return [PlannedChunk(sequence, 1, of_prompt=False) for sequence in sequences]
