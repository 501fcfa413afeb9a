"""Each instance's assigned requests that have not ended, in arrays by slot (Mooncake, section 6.1).

Events change the arrays, so that a decision only reads them. Slots are those of the prefix index. A request
is in the arrays from its assignment to its end, whatever heartbeats report.

Owns: roles, room, queues of prefills, batches of decodes. Does not know: messages, predictions of times.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.view.estimators import Floats
from mooncake.messages.aging import rank_s
from mooncake.messages.workers import Role

HEARTBEAT_S = 1.0
"""Seconds over which utilisation is measured: the usual time between two heartbeats."""


@dataclass(slots=True)
class AssignedPrefill:
    """A prompt in the queue of a prefill instance.

    The ordered prompt with the lowest `rank_s` is believed to be computed first. Of equal prompts it is the
    one that was ordered first. Workers order prompts in the same way, with two exceptions: their prompts
    without a deadline take turns between tenants, and a prompt may wait for blocks that another prompt
    computes (`workers.prefill.queue`).
    """

    left_s: float
    """Predicted seconds to compute the prompt; if another one overtook it, those that were left then."""
    priority: int
    ordered_s: float | None = None
    """The time at which the prompt was ordered; None before."""
    rank_s: float = math.inf
    has_begun: bool = False
    is_timed: bool = True
    """Whether no other prompt was computed between this prompt's beginning and its end."""


@dataclass(slots=True)
class _Prefills:
    """The prompts of one instance by their ids: those not ordered yet, and the ordered ones; oldest first."""

    waiting: dict[str, AssignedPrefill]
    ordered: dict[str, AssignedPrefill]
    last_ended_s: float = -math.inf
    head: AssignedPrefill | None = None
    """The prompt that is being computed; None without one."""
    head_began_s: float = -math.inf

    @property
    def all(self) -> list[AssignedPrefill]:
        return [*self.waiting.values(), *self.ordered.values()]


class Loads:
    """The loads of all slots, as arrays.

    A slot without an instance has zeros, except 1 in `max_batch` and minus infinity in `ends_s`.
    """

    is_prefill: NDArray[np.bool_]
    is_decode: NDArray[np.bool_]
    inlines: NDArray[np.bool_]
    """Whether the decode instance computes prompts of its own requests."""
    prefill_room_blocks: NDArray[np.int64]
    """Blocks of the longest sequence that fits into the idle prefill instance; 0 for other roles."""
    decode_room_blocks: NDArray[np.int64]
    """Blocks of the longest sequence that fits into the idle decode instance; 0 for other roles."""
    least_chunk_tokens: NDArray[np.int64]
    """The fewest tokens of an inlined prompt in an iteration with other requests; 0 for no minimum."""
    num_assigned: NDArray[np.int64]
    """Requests assigned to the instance, for prefill or for decode.

    While an inlined prompt has not been computed, its request counts twice.
    """
    head_priority: NDArray[np.int64]
    """The priority of the prompt that is being computed."""
    utilisation: Floats
    """U of BanaServe's equation 37, from 0 to 2: the shares of compute and memory in use.

    The value is the last heartbeat's, plus the predicted compute of prompts that were assigned since.
    """
    queued_s: Floats
    """Predicted seconds of all assigned prefills that have not ended."""
    behind_head_s: Floats
    """Predicted seconds of the assigned prefills behind the one being computed."""
    ends_s: Floats
    """The time at which all prefills will have ended; minus infinity while none is computed."""
    batch_size: Floats
    """Requests assigned to the decode instance."""
    num_kv_tokens: Floats
    """Prompt tokens of the requests in `batch_size`."""
    num_decoding: Floats
    """Assigned requests whose prefill has ended."""
    num_decoding_tokens: Floats
    """Prompt tokens of the requests in `num_decoding`."""
    num_awaiting_turn: Floats
    """Requests of `num_decoding` that wait at the double check for the batch's TBT to fall.

    The number is the last heartbeat's, updated by later events. Requests that wait for a batch slot do not
    count.
    """
    num_prompts: Floats
    """Assigned prompts that have not been computed."""
    max_batch: Floats
    """Batch slots of the instance: the most requests that it decodes together; 1 without an instance."""

    def __init__(self) -> None:
        self._prefills: list[_Prefills] = []
        self._queued_s: dict[int, Floats] = {}
        """`queued_s` by priority, for each priority that a queued prompt has."""
        self._num_queued: Counter[int] = Counter()
        self._set_columns(np.zeros((3, 0), np.bool_), np.zeros((5, 0), np.int64), np.zeros((11, 0)))

    def _set_columns(self, flags: NDArray[np.bool_], counts: NDArray[np.int64], sums: Floats) -> None:
        """Bind the attributes to the rows of three matrices, whose columns are the slots."""
        self._flags, self._counts, self._sums = flags, counts, sums
        self.is_prefill, self.is_decode, self.inlines = flags
        (
            self.prefill_room_blocks,
            self.decode_room_blocks,
            self.least_chunk_tokens,
            self.num_assigned,
            self.head_priority,
        ) = counts
        (
            self.utilisation,
            self.queued_s,
            self.behind_head_s,
            self.ends_s,
            self.batch_size,
            self.num_kv_tokens,
            self.num_decoding,
            self.num_decoding_tokens,
            self.num_awaiting_turn,
            self.num_prompts,
            self.max_batch,
        ) = sums

    @property
    def num_slots(self) -> int:
        """The number of slots that an instance has or had."""
        return len(self._prefills)

    @property
    def has_several_priorities(self) -> bool:
        """Whether the queued prompts have different priorities."""
        return len(self._queued_s) > 1

    def reset(
        self,
        slot: int,
        role: Role | None,
        room_blocks: int = 0,
        max_batch: int = 1,
        *,
        inlines: bool = False,
        least_chunk_tokens: int = 0,
    ) -> None:
        """Reset a slot for another instance, or for none if `role` is None. Slots are added as needed."""
        while self.num_slots <= slot:
            self._prefills.append(_Prefills({}, {}))
        self._set_columns(*(self._grown(matrix) for matrix in (self._flags, self._counts, self._sums)))
        for matrix in (self._flags, self._counts, self._sums):
            matrix[:, slot] = 0
        for prefill in self._prefills[slot].all:
            self._leave_level(slot, prefill)
        self._queued_s = {priority: self._grown(queued_s) for priority, queued_s in self._queued_s.items()}
        self._prefills[slot] = _Prefills({}, {})
        self.max_batch[slot] = max_batch
        self.least_chunk_tokens[slot] = least_chunk_tokens
        self._set_head(slot)
        self.set_role(slot, role, room_blocks, inlines=inlines)

    def _grown(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of an array with a column for each slot."""
        missing = np.zeros((*array.shape[:-1], self.num_slots - array.shape[-1]), array.dtype)
        return np.append(array, missing, axis=-1)

    def set_role(self, slot: int, role: Role | None, room_blocks: int = 0, *, inlines: bool = False) -> None:
        """Set the role for which an instance gets requests; None for no role. Its present requests stay.

        `inlines`: the instance computes prompts of requests that it decodes.
        """
        self.is_prefill[slot] = role is Role.PREFILL
        self.is_decode[slot] = role in (Role.DECODE, Role.BOTH)
        self.inlines[slot] = inlines
        self.set_room(slot, room_blocks)

    def set_room(self, slot: int, num_blocks: int) -> None:
        """Set the blocks of the longest sequence that fits into the instance without requests."""
        self.prefill_room_blocks[slot] = num_blocks if self.is_prefill[slot] else 0
        self.decode_room_blocks[slot] = num_blocks if self.is_decode[slot] else 0

    def queue_s(self, now_s: float, priority: int = 0) -> Floats:
        """Return the seconds until each instance has computed all prompts ahead of one of `priority`.

        The time already spent on the present prompt is subtracted.
        """
        left_s: Floats = np.maximum(self.ends_s - now_s, self.behind_head_s)
        behind_s = self.behind_s(priority)
        return left_s if behind_s is None else left_s - behind_s

    def behind_s(self, priority: int) -> Floats | None:
        """Return the predicted seconds of the queued prompts that a new prompt of `priority` overtakes.

        None if the new prompt would overtake none on any instance.
        """
        behind = [queued_s for level, queued_s in self._queued_s.items() if level > priority]
        if not behind:
            return None
        # A new prompt does not interrupt the one being computed for long: its remaining seconds come first.
        head_left_s = np.where(self.head_priority > priority, self.queued_s - self.behind_head_s, 0.0)
        behind_s: Floats = np.sum(behind, axis=0) - head_left_s
        return behind_s

    # -- prefill ------------------------------------------------------------------------------------

    def assign_prefill(self, slot: int, request_id: str, predicted_s: float, priority: int = 0) -> None:
        """Add a prompt that is about to be ordered. `predicted_s`: predicted seconds of its prefill."""
        self._prefills[slot].waiting[request_id] = AssignedPrefill(predicted_s, priority)
        self.num_assigned[slot] += 1
        self.num_prompts[slot] += 1
        self.queued_s[slot] += predicted_s
        self.utilisation[slot] += predicted_s / HEARTBEAT_S
        if priority not in self._queued_s:
            self._queued_s[priority] = np.zeros(self.num_slots)
        self._num_queued[priority] += 1
        self._queued_s[priority][slot] += predicted_s
        self._set_head(slot)

    def order_prefill(self, slot: int, request_id: str, due_s: float, now_s: float) -> None:
        """Record that a prompt was ordered: its instance may compute it from now on.

        `due_s`: the time at which the prompt's first token is due. The worker ranks its prompts by it, too.
        """
        prefills = self._prefills[slot]
        prefill = prefills.waiting.pop(request_id)
        prefill.ordered_s, prefill.rank_s = now_s, rank_s(prefill.priority, due_s)
        prefills.ordered[request_id] = prefill
        head = prefills.head
        if head is not None and prefill.rank_s < head.rank_s:  # the head goes on behind this prompt
            done_s = min(max(now_s - prefills.head_began_s, 0.0), head.left_s)
            head.left_s -= done_s
            self.queued_s[slot] -= done_s
            self._queued_s[head.priority][slot] -= done_s
            head.is_timed = prefill.is_timed = False
        self._set_head(slot)

    def end_prefill(
        self, slot: int, request_id: str, now_s: float, *, was_computed: bool = True
    ) -> float | None:
        """Remove a prompt that was computed or cancelled, so that the next prompt begins. Idempotent.

        Returns the seconds that the prompt took. They count from its order, or from the end of the prompt
        before it if that was later. None if they are unknown.
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
        self.num_prompts[slot] -= 1
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
        """Return whether the instance has ordered prompts that have not ended."""
        return bool(self._prefills[slot].ordered)

    def has_begun(self, slot: int, request_id: str) -> bool:
        """Return whether the prompt is believed to have begun.

        A prompt has begun once it has been first in its instance's order. Instances do not report the
        beginning.
        """
        prefill = self._prefills[slot].ordered.get(request_id)
        return prefill is not None and prefill.has_begun

    def _set_head(self, slot: int) -> None:
        prefills = self._prefills[slot]
        head = min(prefills.ordered.values(), key=lambda prefill: prefill.rank_s, default=None)
        prefills.head = head
        head_s, prefills.head_began_s = 0.0, -math.inf
        if head is not None:
            assert head.ordered_s is not None
            head.has_begun = True
            head_s, self.head_priority[slot] = head.left_s, head.priority
            prefills.head_began_s = max(head.ordered_s, prefills.last_ended_s)
        elif not prefills.waiting:
            self.queued_s[slot] = 0.0  # drops the rounding errors of the sums
        queued_s = self.queued_s.item(slot)
        self.behind_head_s[slot], self.ends_s[slot] = queued_s - head_s, prefills.head_began_s + queued_s

    # -- decode -------------------------------------------------------------------------------------

    def assign_decode(self, slot: int, num_tokens: int) -> None:
        """Add a request with `num_tokens` of prompt to the batch of a decode instance."""
        self.num_assigned[slot] += 1
        self.batch_size[slot] += 1
        self.num_kv_tokens[slot] += num_tokens

    def begin_decode(self, slot: int, num_tokens: int) -> None:
        """Record that a prefill has ended.

        If other requests wait at the double check, this request is assumed to wait there too.
        """
        self.num_decoding[slot] += 1
        self.num_decoding_tokens[slot] += num_tokens
        self.num_awaiting_turn[slot] += self.num_awaiting_turn.item(slot) > 0

    def end_decode(self, slot: int, num_tokens: int, *, has_begun: bool) -> None:
        """Undo `assign_decode`, and `begin_decode` if decode has begun.

        If decode has begun, one of the requests that wait at the double check is assumed to join the batch.
        """
        self.num_assigned[slot] -= 1
        self.batch_size[slot] -= 1
        self.num_kv_tokens[slot] -= num_tokens
        if has_begun:
            self.num_decoding[slot] -= 1
            self.num_decoding_tokens[slot] -= num_tokens
            self.num_awaiting_turn[slot] -= self.num_awaiting_turn.item(slot) > 0

    def set_awaiting_turn(self, slot: int, num_awaiting_turn: int) -> None:
        """Set the number of requests that wait at the double check, from a heartbeat.

        The number is limited to the number of assigned requests whose prefill has ended.
        """
        self.num_awaiting_turn[slot] = min(num_awaiting_turn, self.num_decoding.item(slot))

    def share_in_batches(self, slots: Floats) -> float:
        """Return the share of decoding requests that are in a batch, from 0 to 1.

        `slots` has a weight for each slot: 1 if the slot's requests count, 0 otherwise.
        """
        num_decoding = float(self.num_decoding.dot(slots))
        num_batched = np.minimum(self.num_decoding - self.num_awaiting_turn, self.max_batch)
        return float(num_batched.dot(slots)) / num_decoding if num_decoding else 1.0
