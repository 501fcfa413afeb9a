"""What each instance has been given and has not ended, in arrays by slot (Mooncake, section 6.1).

The arrays change with events, so that a decision only reads them. A slot is the instance's place in the
prefix index. Queues count what the Conductor assigned and has not seen end, not what heartbeats claim.

Owns: roles, room, queues of prefills, batches of decodes. Does not know: messages, predictions of times.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from conductor.view.estimators import Floats
from mooncake.messages.aging import standing_s
from mooncake.messages.workers import Role


@dataclass(slots=True)
class AssignedPrefill:
    """A prompt in the queue of a prefill instance. `ordered_s` is set when it may be computed.

    Of those that may the lowest `standing_s` is computed, the first of several: so do workers.
    """

    left_s: float
    """predicted, of what had not been computed when it last began"""
    priority: int
    ordered_s: float | None = None
    standing_s: float = math.inf
    has_begun: bool = False
    is_timed: bool = True
    """no other one was computed between its beginning and its end"""


@dataclass(slots=True)
class _Prefills:
    """Those of one instance: all, and in the order in which they were ordered."""

    waiting: dict[str, AssignedPrefill]
    ordered: dict[str, AssignedPrefill]
    last_ended_s: float = -math.inf
    head: AssignedPrefill | None = None
    """the one that is computed"""
    head_began_s: float = -math.inf

    @property
    def all(self) -> list[AssignedPrefill]:
        return [*self.waiting.values(), *self.ordered.values()]


class Loads:
    """Arrays have `num_slots` entries; those of slots that nobody has are zero."""

    def __init__(self) -> None:
        self.is_prefill, self.is_decode = np.zeros(0, np.bool_), np.zeros(0, np.bool_)
        self.prefill_room_blocks, self.decode_room_blocks = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """the longest sequence that fits when all that is assigned has ended; 0 for the other role"""
        self.prefill_mask = 0
        """`is_prefill` as the bits of a number"""
        self.memory_usage = np.zeros(0)
        """share of the device's KVCache that is in use, as last heard"""
        self.num_assigned = np.zeros(0, np.int64)
        """requests, as prefill or as decode"""
        self.queued_s = np.zeros(0)
        """predicted times of all prefills that were assigned and have not ended"""
        self.behind_head_s, self.ends_s = np.zeros(0), np.zeros(0)
        """the same without the one that is computed; when all will have ended, minus infinity without one"""
        self.batch_size, self.num_kv_tokens = np.zeros(0), np.zeros(0)
        """of the requests assigned to a decode instance: how many, and tokens of their prompts"""
        self.num_decoding, self.num_decoding_tokens = np.zeros(0), np.zeros(0)
        """the same of those whose prefill has ended"""
        self.num_awaiting_turn = np.zeros(0)
        """of these, those that are not in the batch because it is too large for them: as last heard, and what
        has come and gone since"""
        self.head_priority = np.zeros(0, np.int64)
        self._prefills: list[_Prefills] = []
        self._queued_s: dict[int, Floats] = {}
        """`queued_s` by priority, of those that somebody has"""
        self._num_queued: Counter[int] = Counter()

    @property
    def num_slots(self) -> int:
        """Slots that somebody has or had."""
        return len(self._prefills)

    @property
    def has_several_priorities(self) -> bool:
        """Whether some queued prompts go before others."""
        return len(self._queued_s) > 1

    def reset(self, slot: int, role: Role | None, room_blocks: int = 0) -> None:
        """An instance begins in this slot, or (no role) has left it; slots are added as needed."""
        while self.num_slots <= slot:
            self._prefills.append(_Prefills({}, {}))
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                grown = np.append(array, np.zeros(self.num_slots - len(array), array.dtype))
                grown[slot] = 0
                setattr(self, name, grown)
        for prefill in self._prefills[slot].all:
            self._leave_level(slot, prefill)
        self._queued_s = {
            priority: np.append(queued_s, np.zeros(self.num_slots - len(queued_s)))
            for priority, queued_s in self._queued_s.items()
        }
        self._prefills[slot] = _Prefills({}, {})
        self._set_head(slot)
        self.set_role(slot, role, room_blocks)

    def set_role(self, slot: int, role: Role | None, room_blocks: int = 0) -> None:
        """What an instance may be given from now on: nothing without a role. What it has stays."""
        self.is_prefill[slot], self.is_decode[slot] = role is Role.PREFILL, role is Role.DECODE
        self.prefill_mask = self.prefill_mask & ~(1 << slot) | (role is Role.PREFILL) << slot
        self.set_room(slot, room_blocks)

    def set_room(self, slot: int, num_blocks: int) -> None:
        """The longest sequence that fits, in blocks."""
        self.prefill_room_blocks[slot] = num_blocks if self.is_prefill[slot] else 0
        self.decode_room_blocks[slot] = num_blocks if self.is_decode[slot] else 0

    def queue_s(self, now_s: float, priority: int = 0) -> Floats:
        """Until each instance has computed all that it was given and that is not of a higher priority number;
        what the one that is computed has had of its time is taken off."""
        left_s: Floats = np.maximum(self.ends_s - now_s, self.behind_head_s)
        behind_s = self.behind_s(priority)
        return left_s if behind_s is None else left_s - behind_s

    def behind_s(self, priority: int) -> Floats | None:
        """Of that, what has a higher priority number; None if nothing has."""
        behind = [queued_s for level, queued_s in self._queued_s.items() if level > priority]
        if not behind:
            return None
        # What is computed is not interrupted for long.
        stays_s = np.where(self.head_priority > priority, self.queued_s - self.behind_head_s, 0.0)
        behind_s: Floats = np.sum(behind, axis=0) - stays_s
        return behind_s

    # -- prefill ------------------------------------------------------------------------------------

    def assign_prefill(self, slot: int, request_id: str, predicted_s: float, priority: int = 0) -> None:
        """It is about to be ordered."""
        self._prefills[slot].waiting[request_id] = AssignedPrefill(predicted_s, priority)
        self.num_assigned[slot] += 1
        self.queued_s[slot] += predicted_s
        if priority not in self._queued_s:
            self._queued_s[priority] = np.zeros(self.num_slots)
        self._num_queued[priority] += 1
        self._queued_s[priority][slot] += predicted_s
        self._set_head(slot)

    def order_prefill(self, slot: int, request_id: str, due_s: float, now_s: float) -> None:
        """It may be computed; its first token is due at `due_s`, as the worker counts."""
        prefills = self._prefills[slot]
        prefill = prefills.waiting.pop(request_id)
        prefill.ordered_s, prefill.standing_s = now_s, standing_s(prefill.priority, due_s)
        prefills.ordered[request_id] = prefill
        head = prefills.head
        if head is not None and prefill.standing_s < head.standing_s:  # it goes on behind this one
            done_s = min(max(now_s - prefills.head_began_s, 0.0), head.left_s)
            head.left_s -= done_s
            self.queued_s[slot] -= done_s
            self._queued_s[head.priority][slot] -= done_s
            head.is_timed = prefill.is_timed = False
        self._set_head(slot)

    def end_prefill(
        self, slot: int, request_id: str, now_s: float, *, was_computed: bool = True
    ) -> float | None:
        """It has been computed, or is not wanted any more: the next one begins now. Idempotent.

        How long it took, behind those before it; None if that cannot be told.
        """
        prefills = self._prefills[slot]
        prefill = prefills.waiting.pop(request_id, None) or prefills.ordered.get(request_id)
        if prefill is None:
            return None
        seconds = None
        if prefill.ordered_s is not None and (was_computed or prefill is prefills.head):
            if was_computed and prefill is prefills.head and prefill.is_timed:
                seconds = now_s - max(prefill.ordered_s, prefills.last_ended_s)
            prefills.last_ended_s = now_s
        prefills.ordered.pop(request_id, None)
        self.num_assigned[slot] -= 1
        self.queued_s[slot] -= prefill.left_s
        self._leave_level(slot, prefill)
        self._set_head(slot)
        return seconds

    def _leave_level(self, slot: int, prefill: AssignedPrefill) -> None:
        priority = prefill.priority
        self._queued_s[priority][slot] -= prefill.left_s
        self._num_queued[priority] -= 1
        if not self._num_queued[priority]:
            del self._queued_s[priority], self._num_queued[priority]

    def has_ordered_prefills(self, slot: int) -> bool:
        """Whether something is computed there, or could be."""
        return bool(self._prefills[slot].ordered)

    def has_begun(self, slot: int, request_id: str) -> bool:
        """Whether it has been the turn of this prompt."""
        prefill = self._prefills[slot].ordered.get(request_id)
        return prefill is not None and prefill.has_begun

    def _set_head(self, slot: int) -> None:
        prefills = self._prefills[slot]
        head = min(prefills.ordered.values(), key=lambda prefill: prefill.standing_s, default=None)
        prefills.head = head
        head_s, prefills.head_began_s = 0.0, -math.inf
        if head is not None:
            assert head.ordered_s is not None
            head.has_begun = True
            head_s, self.head_priority[slot] = head.left_s, head.priority
            prefills.head_began_s = max(head.ordered_s, prefills.last_ended_s)
        elif not prefills.waiting:
            self.queued_s[slot] = 0.0  # rounding does not add up
        queued_s = self.queued_s.item(slot)
        self.behind_head_s[slot], self.ends_s[slot] = queued_s - head_s, prefills.head_began_s + queued_s

    # -- decode -------------------------------------------------------------------------------------

    def assign_decode(self, slot: int, num_tokens: int) -> None:
        """A request with so many prompt tokens is going to be decoded here."""
        self.num_assigned[slot] += 1
        self.batch_size[slot] += 1
        self.num_kv_tokens[slot] += num_tokens

    def begin_decode(self, slot: int, num_tokens: int) -> None:
        """Its prefill has ended. Who comes behind others that wait for their turn waits too."""
        self.num_decoding[slot] += 1
        self.num_decoding_tokens[slot] += num_tokens
        self.num_awaiting_turn[slot] += self.num_awaiting_turn.item(slot) > 0

    def end_decode(self, slot: int, num_tokens: int, *, has_begun: bool) -> None:
        """Undoes `assign_decode`, and `begin_decode` if it has begun. Then it is somebody else's turn."""
        self.num_assigned[slot] -= 1
        self.batch_size[slot] -= 1
        self.num_kv_tokens[slot] -= num_tokens
        if has_begun:
            self.num_decoding[slot] -= 1
            self.num_decoding_tokens[slot] -= num_tokens
            self.num_awaiting_turn[slot] -= self.num_awaiting_turn.item(slot) > 0

    def hear_turns(self, slot: int, num_awaiting_turn: int) -> None:
        """So many wait for their turn, as it says: it may have been before the latest came or went."""
        self.num_awaiting_turn[slot] = min(num_awaiting_turn, self.num_decoding.item(slot))

    def share_in_batches(self, slots: Floats) -> float:
        """Of the requests that these decode, those that are in their batches."""
        num_decoding = float(self.num_decoding.dot(slots))
        return 1.0 - float(self.num_awaiting_turn.dot(slots)) / num_decoding if num_decoding else 1.0
