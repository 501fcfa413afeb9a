"""The requests at a simulated decode instance.

Owns: the state of these requests. Does not know: what changes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.batch import Member
from benchmarks.tools.simulator.cluster.cache import Reservation
from benchmarks.tools.simulator.cluster.decode.inlining import Prompt
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.messages.costs import HOLD_SHARE
from mooncake.messages.requests import Ref


@dataclass(slots=True, eq=False)
class Sequence:
    """One request at a decode instance. `has_begun` says whether its first token may leave."""

    ref: Ref
    request: SimulatedRequest
    member: Member
    tbt_slo_s: float | None
    """The request's TBT SLO in seconds; None if the request must not be refused."""
    prompt: Prompt | None = None
    """The prompt if this instance computes it."""
    reservation: Reservation | None = None
    take_back: Callable[[], None] | None = None
    """A callback that cancels the wait for pages."""
    holds_first: bool = False
    """Whether the first token may be held, because the order to reserve has a TBT SLO.

    It is held if it also has a deadline (`due_s`) and is not the last token.
    The rule is that of `workers.decode.tbt_slo.double_check.HeldTokens`.
    """
    due_s: float | None = None
    """The time at which the first token is due."""
    held_until_s: float | None = None
    """The time at which a held first token leaves, unless its sequence joins the batch earlier.

    None if the token is not held.
    """
    has_begun: bool = False
    has_arrived: bool = False
    is_waiting: bool = False
    """Whether the request waits for a slot in the batch."""

    def first_may_leave(self, now_s: float) -> None:
        """Send the first token, or hold it."""
        if self.holds_first and self.due_s is not None and self.member.num_left:
            self.held_until_s = now_s + HOLD_SHARE * max(0.0, self.due_s - now_s)
        else:
            self.request.first_token_s = self.member.left_s = now_s

    def first_leaves(self, now_s: float) -> None:
        """Send the first token if it is still held, because its sequence joins the batch. Idempotent."""
        if self.held_until_s is not None and self.request.first_token_s is None:
            self.request.first_token_s = self.member.left_s = min(now_s, self.held_until_s)


class Sequences:
    """All sequences of one instance, and the numbers of their tokens outside the batch."""

    def __init__(self) -> None:
        self._by_ref: dict[Ref, Sequence] = {}
        self._by_member: dict[Member, Sequence] = {}
        self.num_begun = 0
        self.num_outside_tokens = 0
        """Tokens of all sequences that are not in the batch."""
        self.num_begun_outside_tokens = 0
        """Tokens of the sequences that have begun and are not in the batch."""

    def __len__(self) -> int:
        return len(self._by_ref)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_ref.values())

    def get(self, ref: Ref) -> Sequence | None:
        return self._by_ref.get(ref)

    def of(self, member: Member) -> Sequence:
        """Return the sequence of a member of the batch."""
        return self._by_member[member]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the batch."""
        self._by_ref[sequence.ref] = self._by_member[sequence.member] = sequence
        self._count(sequence, 1)

    def begin(self, sequence: Sequence) -> None:
        """Record that a sequence has its turn."""
        sequence.has_begun = True
        self.num_begun += 1
        self.num_begun_outside_tokens += sequence.member.num_tokens

    def draw(self, sequence: Sequence) -> None:
        """Record a token that a sequence outside the batch has drawn."""
        sequence.member.num_tokens += 1
        sequence.member.num_left -= 1
        self.num_outside_tokens += 1
        self.num_begun_outside_tokens += 1

    def join(self, sequence: Sequence) -> None:
        """Record that a sequence joins the batch."""
        self.num_outside_tokens -= sequence.member.num_tokens
        self.num_begun_outside_tokens -= sequence.member.num_tokens

    def leave(self, sequence: Sequence) -> None:
        """Record that a sequence has left the batch."""
        self.num_outside_tokens += sequence.member.num_tokens
        self.num_begun_outside_tokens += sequence.member.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is not in the batch."""
        del self._by_ref[sequence.ref], self._by_member[sequence.member]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sign * sequence.member.num_tokens
        self.num_outside_tokens += num_tokens
        if sequence.has_begun:
            self.num_begun += sign
            self.num_begun_outside_tokens += num_tokens
