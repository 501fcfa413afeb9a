"""The times at which a prompt took its steps at a prefill instance, or in one stage.

Owns: these times, by the monotonic clock. Does not know: what they are for.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.kvcache.layerwise import PassPart


class PassTimes(NamedTuple):
    """One pass, as far as it is the prompt's."""

    began_s: float
    ended_s: float
    start: int
    """Position in the prompt from which the pass computes."""
    num_tokens: int
    num_loaded_blocks: int
    """Blocks that the pass brings from the pool to the device, layer by layer."""
    num_stored_blocks: int
    """Blocks of which the pass stores layers in the pool."""
    load_wait_s: float
    """Seconds for which the pass has waited for loads."""
    is_computed: bool


@dataclass(slots=True)
class PromptTimes:
    """The times of one prompt. None for steps that have not been taken."""

    received_s: float = field(default_factory=time.monotonic)
    turn_s: float | None = None
    """Time when the prompt might get memory."""
    memory_s: float | None = None
    """Time when it had its pages."""
    pass_began_s: float = 0.0
    """Beginning of the present pass, or of the latest one."""
    passes: list[PassTimes] = field(default_factory=list)
    stored_s: float | None = None
    """Time when the pool had the last block."""
    sent_s: float | None = None
    """Time when the decode side had it."""
    error: str = ""
    """Why the prompt's time here has ended before."""

    def note_turn(self) -> None:
        """Record that the prompt may get memory."""
        self.turn_s = time.monotonic()

    def note_memory(self) -> None:
        """Record that the prompt has its pages."""
        self.memory_s = time.monotonic()

    def note_pass(self) -> None:
        """Record that a pass begins."""
        self.pass_began_s = time.monotonic()

    def note_pass_end(self, part: PassPart, *, is_computed: bool) -> None:
        """Record that the pass has ended of which `part` was the prompt's."""
        self.passes.append(
            PassTimes(
                self.pass_began_s,
                time.monotonic(),
                part.chunk.start,
                len(part.chunk.token_ids),
                len(part.loads),
                len(part.stores),
                part.load_wait_s,
                is_computed,
            )
        )

    def note_stored(self) -> None:
        """Record that the pool has all blocks."""
        self.stored_s = time.monotonic()

    def note_sent(self) -> None:
        """Record that the decode side has them."""
        self.sent_s = time.monotonic()
