"""The times at which a prompt took its steps at a prefill instance, or in one stage.

Owns: these times, by the monotonic clock. Does not know: their readers.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.kvcache.layerwise import PassPart


class PassTimes(NamedTuple):
    """The times of one pass, and one prompt's part in this pass."""

    began_s: float
    ended_s: float | None
    """The time at which the pass ended; None while it runs."""
    start: int
    """The position in the prompt from which the pass computes."""
    num_tokens: int
    num_loaded_blocks: int
    """Blocks that the pass loads from the pool to the device, layer by layer."""
    num_stored_blocks: int
    """Blocks whose layers the pass stores in the pool."""
    load_wait_s: float = 0.0
    """Seconds for which the pass has waited for loads."""
    is_computed: bool = False


@dataclass(slots=True)
class PromptTimes:
    """The times of one prompt's steps. The time of a step is None until the prompt has taken it."""

    received_s: float = field(default_factory=time.monotonic)
    queued_s: float | None = None
    """The time at which the prompt entered the wait queue; None in stages without a queue."""
    turn_s: float | None = None
    """The time from which the prompt was allowed to get memory."""
    memory_s: float | None = None
    """The time at which the prompt had its pages."""
    passes: list[PassTimes] = field(default_factory=list)
    stored_s: float | None = None
    """The time at which the pool had the last block."""
    sent_s: float | None = None
    """The time at which the decode side had the last block."""
    error: str = ""
    """The reason why the prompt's time in this stage ended early; empty if it did not."""

    def note_queued(self) -> None:
        """Record that the prompt waits for its turn."""
        self.queued_s = time.monotonic()

    def note_turn(self) -> None:
        """Record that the prompt may get memory."""
        self.turn_s = time.monotonic()

    def note_memory(self) -> None:
        """Record that the prompt has its pages."""
        self.memory_s = time.monotonic()

    def note_pass(self, part: PassPart) -> None:
        """Record the beginning of a pass; `part` is the prompt's part of it."""
        start, num_tokens = part.chunk.start, len(part.chunk.token_ids)
        begun = PassTimes(time.monotonic(), None, start, num_tokens, len(part.loads), len(part.stores))
        self.passes.append(begun)

    def note_pass_end(self, part: PassPart, *, is_computed: bool) -> None:
        """Record the end of a pass; `part` was the prompt's part of it."""
        self.passes[-1] = self.passes[-1]._replace(
            ended_s=time.monotonic(), load_wait_s=part.load_wait_s, is_computed=is_computed
        )

    def note_stored(self) -> None:
        """Record that the pool has all blocks of the prompt."""
        self.stored_s = time.monotonic()

    def note_sent(self) -> None:
        """Record that the decode side has all blocks of the prompt."""
        self.sent_s = time.monotonic()
