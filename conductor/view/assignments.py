"""Follows every placed request through its steps, and teaches the view what they took.

Between a placement and its end a request is part of the queue of its prefill instance, of the batch of its
decode instance, of the traffic of its source, and of the forecast: exactly once in each, however it ends.

Owns: those memberships. Does not know: messages, states, why a request ends.
"""

import math
from collections import Counter
from dataclasses import dataclass

from conductor.rules import Rules, SLOs
from conductor.view.cluster_view import ClusterView
from conductor.view.forecast import Forecast, Stay
from conductor.view.instances import Instance
from conductor.view.lateness import Lateness
from conductor.view.outcomes import Outcomes
from conductor.view.placement import Placement
from mooncake.messages.aging import due_s
from mooncake.messages.requests import Request
from mooncake.messages.workers import PrefixSource


@dataclass(slots=True)
class Assignment:
    """One placement of one request. Slots are those that its instances had then."""

    request: Request
    placement: Placement
    assigned_s: float
    prefill_slot: int
    decode_slot: int
    source_slot: int | None
    fetched_bytes: float
    stay: Stay
    """in the forecast"""
    device_s: float
    """what it is predicted to take of the devices"""
    slos: SLOs
    delay_s: float = 0.0
    """of prefills that came later and go first"""
    decode_began_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """When it is expected, by now."""
        return self.assigned_s + self.placement.prediction.ttft_s + self.delay_s

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return len(self.request.token_ids)


class Assignments:
    """Of all requests that are placed, by their ids."""

    def __init__(
        self, view: ClusterView, forecast: Forecast, lateness: Lateness, outcomes: Outcomes, rules: Rules
    ) -> None:
        self._view, self._forecast, self._lateness = view, forecast, lateness
        self._outcomes, self._rules = outcomes, rules
        self._assignments: dict[str, Assignment] = {}
        self._tbt_slos_s: Counter[float] = Counter()
        self.num_released = 0
        """that have ended or are placed again"""

    def placement_of(self, request_id: str) -> Placement | None:
        """None if it is not placed."""
        assignment = self._assignments.get(request_id)
        return None if assignment is None else assignment.placement

    def get(self, request_id: str) -> Assignment:
        """That of a placed request."""
        return self._assignments[request_id]

    def has_begun(self, request_id: str) -> bool:
        """Whether it has been the turn of its prompt on its prefill instance."""
        return self._view.loads.has_begun(self._assignments[request_id].prefill_slot, request_id)

    @property
    def strictest_tbt_slo_s(self) -> float | None:
        """Of all that are placed."""
        return min(self._tbt_slos_s, default=None)

    def assign(self, request: Request, placement: Placement, slos: SLOs, now_s: float) -> None:
        """It is about to be ordered from this pair."""
        view, loads, prediction = self._view, self._view.loads, placement.prediction
        prefill, decode = view.slot_of(placement.prefill.name), view.slot_of(placement.decode.name)
        assert prefill is not None
        assert decode is not None
        source, fetched_bytes = None, 0.0
        if placement.source is not None:
            assert view.layout is not None
            source = view.slot_of(placement.source.name)
            fetched_bytes = placement.num_fetched_blocks * float(view.layout.block_bytes)
            view.transfers.ordered_bytes[source] += fetched_bytes
        loads.assign_prefill(prefill, request.request_id, prediction.prefill_s, request.priority)
        loads.assign_decode(decode, len(request.token_ids))
        view.decode_changed(decode)
        stay = self._forecast.expect(request, now_s + prediction.ttft_s, prediction.tbt_s)
        self._assignments[request.request_id] = Assignment(
            request,
            placement,
            now_s,
            prefill,
            decode,
            source,
            fetched_bytes,
            stay,
            self._device_s(placement, decode),
            slos,
        )
        if slos.tbt_s is not None:
            self._tbt_slos_s[slos.tbt_s] += 1
        self._outcomes.placed(placement)

    def _device_s(self, placement: Placement, decode_slot: int) -> float:
        """Its prefill, and its part of the decode steps for as long as requests usually are decoded."""
        decode_s = self._forecast.decode_s
        part_s = self._view.decode_costs.first_s.item(decode_slot) / placement.prediction.tbt_s
        return placement.prediction.prefill_s + (part_s * decode_s if decode_s < math.inf else 0.0)

    def order_prefill(
        self,
        request_id: str,
        decode: Instance,
        num_held_blocks: int,
        time_left_s: float | None,
        now_s: float,
    ) -> PrefixSource | None:
        """Decode has its pages, and holds so many of the prompt's first blocks.

        `time_left_s`: until the first token is due. Where prefill may fetch a prefix: hot-spot migration
        (line 29), for what is fetched stays there.
        """
        assignment = self._assignments[request_id]
        loads = self._view.loads
        loads.order_prefill(assignment.prefill_slot, request_id, due_s(time_left_s, now_s), now_s)
        holder, num_blocks = self._holder(assignment.placement, decode, num_held_blocks)
        if holder is None:
            return None
        self._outcomes.ordered_fetch(num_blocks - assignment.placement.num_local_blocks)
        return PrefixSource(holder.registration.shards, num_blocks)

    def _holder(
        self, placement: Placement, decode: Instance, num_held_blocks: int
    ) -> tuple[Instance | None, int]:
        """As placed, unless the decode instance turns out to hold more."""
        if not self._rules.fetches_prefixes:
            return None, 0
        own = self._view.balancing.threshold * placement.num_local_blocks
        if num_held_blocks > max(own, placement.num_source_blocks):
            return decode, num_held_blocks
        source = placement.source
        if source is None or self._view.slot_of(source.name) is None:
            return None, 0
        return source, placement.num_source_blocks

    def end_prefill(self, request_id: str, now_s: float, num_cached_tokens: int | None) -> None:
        """It is decoded from now on. `num_cached_tokens` is None for an inlined prompt."""
        assignment = self._assignments[request_id]
        was_computed = num_cached_tokens is not None
        seconds = self._leave_prefill(request_id, assignment, now_s, was_computed=was_computed)
        if num_cached_tokens is not None:
            ttft_s = now_s - assignment.assigned_s
            self._outcomes.first_token(assignment.placement, ttft_s)
            prediction, slos = assignment.placement.prediction, assignment.slos
            self._lateness.learn(prediction, assignment.delay_s, ttft_s, slos.ttft_s, now_s)
            if seconds is not None and assignment.placement.source is None:  # else it has waited for a fetch
                self._view.prefill_ended(
                    assignment.prefill_slot, assignment.num_tokens, num_cached_tokens, seconds, now_s
                )
        assignment.decode_began_s = now_s
        assignment.stay.end()
        assignment.stay = self._forecast.begin(assignment.request, now_s)
        self._view.loads.begin_decode(assignment.decode_slot, assignment.num_tokens)
        self._steps_change(now_s)

    def end_decode(self, request_id: str, now_s: float, num_output_tokens: int) -> None:
        """It has all its tokens. `release` follows."""
        assignment = self._assignments[request_id]
        assert assignment.decode_began_s is not None
        seconds = now_s - assignment.decode_began_s
        self._forecast.learn(assignment.request, assignment.stay, seconds, num_output_tokens, now_s)
        if num_output_tokens > 1:
            self._outcomes.decoded(assignment.placement, seconds / (num_output_tokens - 1))

    def release(self, request_id: str, now_s: float) -> None:
        """It has ended, or is placed again. Idempotent."""
        assignment = self._assignments.pop(request_id, None)
        if assignment is None:
            return
        self.num_released += 1
        tbt_slo_s = assignment.slos.tbt_s
        if tbt_slo_s is not None:
            self._tbt_slos_s[tbt_slo_s] -= 1
            if not self._tbt_slos_s[tbt_slo_s]:
                del self._tbt_slos_s[tbt_slo_s]
        self._leave_prefill(request_id, assignment, now_s, was_computed=False)
        assignment.stay.end()
        if self._view.holds(assignment.decode_slot, assignment.placement.decode):
            has_begun = assignment.decode_began_s is not None
            self._view.loads.end_decode(assignment.decode_slot, assignment.num_tokens, has_begun=has_begun)
            self._view.decode_changed(assignment.decode_slot)
            if has_begun:
                self._steps_change(now_s)

    def _steps_change(self, now_s: float) -> None:
        """Other requests are decoded."""
        step_s = self._view.mean_step_s()
        if step_s is not None:
            self._forecast.steps.take(step_s, now_s)

    def _leave_prefill(
        self, request_id: str, assignment: Assignment, now_s: float, *, was_computed: bool
    ) -> float | None:
        """How long it took, if it was computed and that can be told. Nothing once it is decoded."""
        if assignment.decode_began_s is not None:
            return None
        view, placement = self._view, assignment.placement
        if placement.source is not None:
            assert assignment.source_slot is not None
            if view.holds(assignment.source_slot, placement.source):
                view.transfers.ordered_bytes[assignment.source_slot] -= assignment.fetched_bytes
        if not view.holds(assignment.prefill_slot, placement.prefill):
            return None
        return view.loads.end_prefill(assignment.prefill_slot, request_id, now_s, was_computed=was_computed)
