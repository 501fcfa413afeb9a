"""A request at a simulated decode instance.

Owns: its state. Does not know: what changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.batch import Member
from benchmarks.tools.simulator.cluster.cache import Reservation
from benchmarks.tools.simulator.cluster.decode.inlining import Prompt
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.messages.costs import HOLD_SHARE
from mooncake.messages.requests import Ref


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. It has begun once its first token may leave."""

    ref: Ref
    request: SimulatedRequest
    member: Member
    tbt_slo_s: float | None
    """The request's SLO; None if it must be taken."""
    prompt: Prompt | None = None
    """The prompt if it is computed here."""
    reservation: Reservation | None = None
    take_back: Callable[[], None] | None = None
    """Callback that takes back its wish for pages."""
    holds_first: bool = False
    """Whether the first token is held, with both SLOs: as `workers.decode.double_check.HeldTokens`."""
    due_s: float | None = None
    """Time when the first token is due."""
    held_until_s: float | None = None
    """Time when the first token leaves if it does not join the batch before; None: it is not held."""
    has_begun: bool = False
    has_arrived: bool = False
    is_waiting: bool = False
    """Whether it waits for a slot in the batch."""

    def first_may_leave(self, now_s: float) -> None:
        """Send the first token, or hold it."""
        if self.holds_first and self.due_s is not None and self.member.num_left:
            self.held_until_s = now_s + HOLD_SHARE * max(0.0, self.due_s - now_s)
        else:
            self.request.first_token_s = self.member.left_s = now_s

    def first_leaves(self, now_s: float) -> None:
        """Send the first token if it is still held, for its sequence joins the batch. Idempotent."""
        if self.held_until_s is not None and self.request.first_token_s is None:
            self.request.first_token_s = self.member.left_s = min(now_s, self.held_until_s)
