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
    ended_s: float | None
    """None in a pass that runs."""
    start: int
    """Position in the prompt from which the pass computes."""
    num_tokens: int
    num_loaded_blocks: int
    """Blocks that the pass brings from the pool to the device, layer by layer."""
    num_stored_blocks: int
    """Blocks of which the pass stores layers in the pool."""
    load_wait_s: float = 0.0
    """Seconds for which the pass has waited for loads."""
    is_computed: bool = False


@dataclass(slots=True)
class PromptTimes:
    """The times of one prompt. None for steps that have not been taken."""

    received_s: float = field(default_factory=time.monotonic)
    queued_s: float | None = None
    """Time when the prompt began to wait for its turn; None in stages that have no queue."""
    turn_s: float | None = None
    """Time when the prompt might get memory."""
    memory_s: float | None = None
    """Time when it had its pages."""
    passes: list[PassTimes] = field(default_factory=list)
    stored_s: float | None = None
    """Time when the pool had the last block."""
    sent_s: float | None = None
    """Time when the decode side had it."""
    error: str = ""
    """Why the prompt's time here has ended before."""

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
        """Record that a pass begins of which `part` is the prompt's."""
        start, num_tokens = part.chunk.start, len(part.chunk.token_ids)
        begun = PassTimes(time.monotonic(), None, start, num_tokens, len(part.loads), len(part.stores))
        self.passes.append(begun)

    def note_pass_end(self, part: PassPart, *, is_computed: bool) -> None:
        """Record that the pass has ended of which `part` was the prompt's."""
        self.passes[-1] = self.passes[-1]._replace(
            ended_s=time.monotonic(), load_wait_s=part.load_wait_s, is_computed=is_computed
        )

    def note_stored(self) -> None:
        """Record that the pool has all blocks."""
        self.stored_s = time.monotonic()

    def note_sent(self) -> None:
        """Record that the decode side has them."""
        self.sent_s = time.monotonic()
