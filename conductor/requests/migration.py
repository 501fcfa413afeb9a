"""One migration for the Conductor: its steps, the allowed changes of step, and its record.

    COPYING <──> PREPARING ──> HANDING_OVER ──> (moved)
        │                        ^    │
        └────────────────────────┘    └──> STRANDED

    every step ──> (ended without a move)

The request is in `RequestState.DECODING` all the time, and has its source's attempt and pair until it has
moved. Before HANDING_OVER a failure ends only the migration, and the source goes on decoding. From
HANDING_OVER on the source may have stopped decoding. If the destination fails then, the migration is STRANDED
until the source has answered.
"""

from dataclasses import dataclass
from enum import Enum, auto

from conductor.view.assignments import Destination
from conductor.view.decision_stats import MigrationOutcome, MigrationReason
from mooncake.messages.requests import Ref


class MigrationStep(Enum):
    """The steps of a migration, each with the message that ends it."""

    COPYING = auto()  # the source stores the request's full blocks: PreCopied
    PREPARING = auto()  # the destination fetches and loads them: Prepared
    HANDING_OVER = auto()  # the source lets the request leave its batch: HandedOver
    STRANDED = auto()  # the same, but the destination was lost or has failed: HandedOver

    __hash__ = object.__hash__


_NEXT: dict[MigrationStep, frozenset[MigrationStep]] = {
    MigrationStep.COPYING: frozenset({MigrationStep.PREPARING, MigrationStep.HANDING_OVER}),
    MigrationStep.PREPARING: frozenset({MigrationStep.COPYING, MigrationStep.HANDING_OVER}),
    MigrationStep.HANDING_OVER: frozenset({MigrationStep.STRANDED}),
    MigrationStep.STRANDED: frozenset(),
}

MAX_ROUNDS = 3
"""The most rounds of copies. After the last round the source hands over, however many tokens are lacking."""
TIMEOUT_S = 10.0
"""Seconds that the copies of a migration may take. The hand-over may take the same time again."""


def step_behind_copies(
    num_lacking: int, num_rounds: int, block_size: int, *, has_waited: bool
) -> MigrationStep:
    """Return the step that follows after the source has stored the request's full blocks.

    The first time the step is PREPARING. Afterwards the step depends on the tokens that the destination
    lacks. The destination would compute them again while all streams of its batch wait:

        more than a block                              PREPARING: full blocks can be loaded
        more than half a block, for the first time     COPYING, as soon as one more block is full
        more than half a block, once more              HANDING_OVER
        at most half a block                           HANDING_OVER

    Args:
        num_lacking: Tokens whose KVCache the destination has not loaded, including the newest token.
        num_rounds: Rounds in which the destination has loaded blocks.
        block_size: Tokens of a block.
        has_waited: Whether the source has waited for a block to become full.
    """
    if not num_rounds:
        return MigrationStep.PREPARING
    if num_lacking <= block_size // 2:
        return MigrationStep.HANDING_OVER
    if num_lacking > block_size:
        return MigrationStep.PREPARING
    return MigrationStep.HANDING_OVER if has_waited else MigrationStep.COPYING


@dataclass(slots=True)
class Migration:
    """A migration that has not ended. Only `conductor.requests.registry` begins and ends it."""

    ref: Ref
    """The name of the attempt that the request will have at its destination."""
    destination: Destination
    """The destination's instance, and the request's share of the load there."""
    reason: MigrationReason
    began_s: float
    deadline_s: float
    """The time at which the migration is given up."""
    step: MigrationStep = MigrationStep.COPYING
    num_held_blocks: int = 0
    """Leading blocks that the destination's pool was believed to hold when the migration began."""
    num_rounds: int = 0
    """Rounds of copies that have ended."""
    num_output_tokens: int = 0
    """The length of the output, in tokens, when the source last stored full blocks."""
    has_waited: bool = False
    """Whether the source was told to copy once it has another full block."""
    num_loaded_tokens: int = 0
    """Tokens whose KVCache the destination has loaded."""
    outcome: MigrationOutcome | None = None
    """The outcome of the migration; None until it is known."""

    @property
    def has_ordered_hand_over(self) -> bool:
        """Whether the source was ordered to hand over. If so, it may have stopped decoding."""
        return self.step in (MigrationStep.HANDING_OVER, MigrationStep.STRANDED)

    def move_to(self, step: MigrationStep) -> None:
        """Change the step. The module's docstring lists the allowed changes."""
        is_allowed = step in _NEXT[self.step]
        assert is_allowed, f"{self.ref}: {self.step.name} -> {step.name}"
        self.step = step
