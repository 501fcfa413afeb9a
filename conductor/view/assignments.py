"""The load that placed requests add to the view, and the costs that are learned from them.

From its placement to its end a request counts once in each of these, however it ends: the queue of its
prefill instance, the prefixes that are coming there, the batch of its decode instance, the traffic of its
prefix source, and the forecast. A migrating request also counts in the batch of its destination.

Owns: these counts. Does not know: messages, states, why a request ends.
"""

import math
from collections import Counter
from dataclasses import dataclass

from conductor.index.coming_prefixes import ComingPrompt
from conductor.settings import PolicySettings, SLOs
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import DecisionStats
from conductor.view.forecast.forecast import Stay
from conductor.view.instances import Instance
from conductor.view.placement import Placement, Prediction
from mooncake.messages.aging import due_s
from mooncake.messages.costs import prefill_quantities
from mooncake.messages.pools import PrefixSource
from mooncake.messages.requests import Request


@dataclass(slots=True)
class Assignment:
    """A request's share of the load that its instances are believed to have."""

    request: Request
    placement: Placement
    slos: SLOs
    assigned_s: float
    prefill_slot: int
    """The prefill instance's slot at the time of the placement."""
    decode_slot: int
    source_slot: int | None
    fetched_bytes: float
    """Bytes that a fetch of the prefix is predicted to move."""
    coming: ComingPrompt
    """The prompt's blocks that will be stored at the prefill instance."""
    stay: Stay
    """The request's entry in the forecast."""
    device_s: float
    """Predicted device seconds that the request takes: its prefill, and its share of decode iterations."""
    delay_s: float = 0.0
    """Predicted seconds of prefills that were assigned after this request and are computed before it."""
    decode_began_s: float | None = None
    has_moved: bool = False
    """Whether the request has left the decode instance for which its times were predicted."""
    is_adopted: bool = False
    """Whether an earlier Conductor placed the request. If so, the time of the placement is unknown."""

    @property
    def first_token_s(self) -> float:
        """The time at which the first token is expected."""
        return self.assigned_s + self.placement.prediction.ttft_s + self.delay_s

    @property
    def num_tokens(self) -> int:
        """The prompt's length in tokens."""
        return len(self.request.token_ids)


@dataclass(slots=True)
class Destination:
    """The share of a migrating request in the load of the instance to which it moves."""

    instance: Instance
    slot: int
    num_tokens: int
    """The prompt's length in tokens, as the source counts it."""
    source: Instance
    source_slot: int
    copied_bytes: float
    """Bytes that the copies are predicted to move."""


class Assignments:
    """Enters placed requests into `view`, follows their steps, and removes them."""

    def __init__(self, view: ClusterView, settings: PolicySettings, stats: DecisionStats) -> None:
        self._view, self._settings, self._stats = view, settings, stats
        self._tbt_slos_s: Counter[float] = Counter()
        """The number of placed requests by TBT SLO."""

    @property
    def strictest_tbt_slo_s(self) -> float | None:
        """The smallest TBT SLO in seconds of all placed requests; None if no request has one."""
        return min(self._tbt_slos_s, default=None)

    def has_begun(self, assignment: Assignment) -> bool:
        """Return whether the prefill instance is believed to have begun to compute the prompt."""
        return self._view.loads.has_begun(assignment.prefill_slot, assignment.request.request_id)

    def assign(self, request: Request, placement: Placement, slos: SLOs, now_s: float) -> Assignment:
        """Enter a request that has just been placed on its pair, and return its assignment."""
        self._stats.placed(placement)
        return self._enter(request, placement, slos, now_s)

    def adopt(
        self,
        request: Request,
        prefill: Instance,
        decode: Instance,
        slos: SLOs,
        time_left_s: float | None,
        now_s: float,
        *,
        is_decoded: bool,
    ) -> Assignment:
        """Enter a request that an earlier Conductor has placed on this pair, and return its assignment.

        Nothing is learned from the request, as the time of its order is unknown.

        Args:
            request: The request.
            prefill: The instance that computes the prompt.
            decode: The instance that decodes, or will decode.
            slos: The limits of the request.
            time_left_s: Seconds until the first token is due; None without a TTFT SLO.
            now_s: The time.
            is_decoded: Whether decode has begun.
        """
        view = self._view
        slot, decode_slot = view.slot_of(prefill.name), view.slot_of(decode.name)
        assert slot is not None
        assert decode_slot is not None
        num_tokens = len(request.token_ids)
        prefill_s = (
            0.0 if is_decoded else view.prefill_costs.predict_s(slot, *prefill_quantities(num_tokens, 0))
        )
        prediction = Prediction(0.0, 0.0, prefill_s, view.next_gap_s(decode_slot, num_tokens))
        assignment = self._enter(request, Placement(prefill, decode, 0, 0, None, 0, prediction), slos, now_s)
        assignment.is_adopted = True
        view.loads.order_prefill(slot, request.request_id, due_s(time_left_s, now_s), now_s)
        if is_decoded:
            self._leave_prefill(assignment, now_s, was_computed=False)
            self._begin_decode(assignment, now_s)
        return assignment

    def _enter(self, request: Request, placement: Placement, slos: SLOs, now_s: float) -> Assignment:
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
        prefill_s = prediction.prefill_s + prediction.beside_s
        loads.assign_prefill(prefill, request.request_id, prefill_s, request.priority)
        loads.assign_decode(decode, len(request.token_ids))
        view.decode_changed(decode)
        if slos.tbt_s is not None:
            self._tbt_slos_s[slos.tbt_s] += 1
        return Assignment(
            request,
            placement,
            slos,
            now_s,
            prefill,
            decode,
            source,
            fetched_bytes,
            coming=view.coming.add(prefill, request.priority, request.block_keys),
            stay=view.forecast.expect(request, now_s + prediction.ttft_s, prediction.gap_s),
            device_s=self._device_s(placement, decode),
        )

    def _device_s(self, placement: Placement, decode_slot: int) -> float:
        """Return the predicted device seconds of the request.

        They are its prefill, and the time that it adds to the iterations of a decode of mean length.
        """
        decode_s = self._view.forecast.decode_s
        share = self._view.decode_costs.first_s.item(decode_slot) / placement.prediction.gap_s
        return placement.prediction.prefill_s + (share * decode_s if decode_s < math.inf else 0.0)

    def order_prefill(
        self, assignment: Assignment, num_held_blocks: int, time_left_s: float | None, now_s: float
    ) -> PrefixSource | None:
        """Record that the prompt is ordered, and return the source of its prefix.

        Args:
            assignment: The assignment of the request.
            num_held_blocks: The number of the prompt's leading blocks that the decode instance holds.
            time_left_s: Seconds until the first token is due; None without a TTFT SLO.
            now_s: The time.

        Returns:
            The instance to fetch a prefix from; None if none is fetched. Fetched blocks stay in the fetching
            instance's pool: this is the hot-spot migration of Algorithm 1, line 29.
        """
        placement, request_id = assignment.placement, assignment.request.request_id
        loads = self._view.loads
        loads.order_prefill(assignment.prefill_slot, request_id, due_s(time_left_s, now_s), now_s)
        source, num_blocks = self._source(placement, num_held_blocks)
        if source is None:
            return None
        self._stats.ordered_fetch(num_blocks - placement.num_local_blocks)
        return PrefixSource(source.registration.shards, num_blocks)

    def _source(self, placement: Placement, num_held_blocks: int) -> tuple[Instance | None, int]:
        """Return the source of the prompt's prefix and the number of blocks there; `(None, 0)` for none.

        The decode instance is the source if it holds more blocks than the placement's source, and more than
        the balancing threshold times the prefill instance's own. Otherwise the placement's source is taken.
        An inlined prompt has no source.
        """
        if placement.is_inlined or not self._settings.fetches_prefixes:
            return None, 0
        own = self._view.balancing.threshold * placement.num_local_blocks
        if num_held_blocks > max(own, placement.num_source_blocks):
            return placement.decode, num_held_blocks
        source = placement.source
        if source is None or self._view.slot_of(source.name) is None:
            return None, 0
        return source, placement.num_source_blocks

    def end_prefill(self, assignment: Assignment, now_s: float, num_cached_tokens: int) -> None:
        """Record that the prompt has been computed, and that decode begins."""
        seconds = self._leave_prefill(assignment, now_s, was_computed=True)
        if not assignment.is_adopted:
            self._learn_prefill(assignment, now_s, num_cached_tokens, seconds)
        self._begin_decode(assignment, now_s)

    def _learn_prefill(
        self, assignment: Assignment, now_s: float, num_cached_tokens: int, seconds: float | None
    ) -> None:
        view, placement = self._view, assignment.placement
        ttft_s = now_s - assignment.assigned_s
        self._stats.first_token(placement, ttft_s)
        view.ttft_correction(placement).learn(
            placement.prediction, assignment.delay_s, ttft_s, assignment.slos.ttft_s, now_s
        )
        if seconds is not None and placement.source is None:  # else it has waited for a fetch
            seconds -= placement.prediction.beside_s
            view.prefill_ended(
                assignment.prefill_slot, assignment.num_tokens, num_cached_tokens, seconds, now_s
            )

    def _begin_decode(self, assignment: Assignment, now_s: float) -> None:
        view = self._view
        assignment.decode_began_s = now_s
        assignment.stay.end()
        assignment.stay = view.forecast.begin(assignment.request, now_s)
        view.loads.begin_decode(assignment.decode_slot, assignment.num_tokens)
        self._iterations_change(now_s)

    def end_decode(self, assignment: Assignment, now_s: float, num_output_tokens: int) -> None:
        """Learn from a request that has all its tokens. The caller must call `release` afterwards."""
        assert assignment.decode_began_s is not None
        if assignment.is_adopted:
            return
        seconds = now_s - assignment.decode_began_s
        self._view.forecast.learn(assignment.request, assignment.stay, seconds, num_output_tokens, now_s)
        num_gaps = num_output_tokens - assignment.request.num_output_tokens - 1
        if num_gaps > 0 and not assignment.has_moved:
            self._stats.decoded(assignment.placement, seconds / num_gaps)

    def reserve(self, assignment: Assignment, instance: Instance, copied_bytes: float) -> Destination:
        """Enter a migrating request into the batch of its destination too.

        Returns the request's share of the load there.
        """
        view, source = self._view, assignment.placement.decode
        slot = view.slot_of(instance.name)
        assert slot is not None
        view.loads.assign_decode(slot, assignment.num_tokens)
        view.decode_changed(slot)
        view.transfers.ordered_bytes[assignment.decode_slot] += copied_bytes
        return Destination(
            instance, slot, assignment.num_tokens, source, assignment.decode_slot, copied_bytes
        )

    def unreserve(self, destination: Destination) -> None:
        """Undo `reserve` for a request that does not move."""
        self._end_copies(destination)
        if self._view.holds(destination.slot, destination.instance):
            self._view.loads.end_decode(destination.slot, destination.num_tokens, has_begun=False)
            self._view.decode_changed(destination.slot)

    def move(self, assignment: Assignment, destination: Destination, now_s: float) -> None:
        """Record that the destination decodes the request from now on, and remove the source's share."""
        view, num_tokens = self._view, assignment.num_tokens
        self._end_copies(destination)
        view.loads.end_decode(assignment.decode_slot, num_tokens, has_begun=True)
        view.decode_changed(assignment.decode_slot)
        view.loads.begin_decode(destination.slot, num_tokens)
        self._iterations_change(now_s)
        instance = destination.instance
        assignment.placement = assignment.placement._replace(prefill=instance, decode=instance)
        assignment.prefill_slot = assignment.decode_slot = destination.slot
        assignment.has_moved = True

    def _end_copies(self, destination: Destination) -> None:
        if self._view.holds(destination.source_slot, destination.source):
            self._view.transfers.ordered_bytes[destination.source_slot] -= destination.copied_bytes

    def release(self, assignment: Assignment, now_s: float) -> None:
        """Remove a request that has ended, or that will be placed again. An assignment is released once."""
        view = self._view
        tbt_slo_s = assignment.slos.tbt_s
        if tbt_slo_s is not None:
            self._tbt_slos_s[tbt_slo_s] -= 1
            if not self._tbt_slos_s[tbt_slo_s]:
                del self._tbt_slos_s[tbt_slo_s]
        self._leave_prefill(assignment, now_s, was_computed=False)
        assignment.stay.end()
        if view.holds(assignment.decode_slot, assignment.placement.decode):
            has_begun = assignment.decode_began_s is not None
            view.loads.end_decode(assignment.decode_slot, assignment.num_tokens, has_begun=has_begun)
            view.decode_changed(assignment.decode_slot)
            if has_begun:
                self._iterations_change(now_s)

    def _iterations_change(self, now_s: float) -> None:
        """Update the forecast's duration of an iteration, now that the batches have changed."""
        iteration_s = self._view.mean_iteration_s()
        if iteration_s is not None:
            self._view.forecast.iterations.take(iteration_s, now_s)

    def _leave_prefill(self, assignment: Assignment, now_s: float, *, was_computed: bool) -> float | None:
        """Remove the request from the prefill queue, the coming prefixes and its source's traffic.

        Does nothing if decode has begun already.

        Returns the seconds that the prefill took; None if the prompt was not computed, or the time is
        unknown.
        """
        if assignment.decode_began_s is not None:
            return None
        view, placement = self._view, assignment.placement
        if was_computed:
            view.coming.stored(assignment.coming, now_s)
        else:
            view.coming.remove(assignment.coming)
        if placement.source is not None:
            assert assignment.source_slot is not None
            if view.holds(assignment.source_slot, placement.source):
                view.transfers.ordered_bytes[assignment.source_slot] -= assignment.fetched_bytes
        if not view.holds(assignment.prefill_slot, placement.prefill):
            return None
        request_id = assignment.request.request_id
        return view.loads.end_prefill(assignment.prefill_slot, request_id, now_s, was_computed=was_computed)
