"""The Conductor's view of its instances. Events keep the view up to date, and every decision reads it.

Owns: which instance has which slot; prefixes, loads, learned costs and traffic by slot; the forecast of
decode; corrections of predictions. Does not know: how anything is decided, sockets, the clock.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from conductor.index.coming_prefixes import ComingPrefixes
from conductor.index.prefix_index import PrefixIndex
from conductor.performance.utilisation import Utilisation
from conductor.settings import PolicySettings
from conductor.view.balancing import BalancingThreshold
from conductor.view.corrections import TBTCorrection, TTFTCorrection
from conductor.view.estimators import (
    DECODE_DOUBT,
    GENERIC_DECODE_COSTS,
    GENERIC_PREFILL_COSTS,
    PREFILL_DOUBT,
    CostEstimator,
    DecodePool,
    Floats,
)
from conductor.view.forecast.forecast import forecast_of
from conductor.view.instances import Instance
from conductor.view.loads import Loads
from conductor.view.measurements import PrefillPass, plain_iterations
from conductor.view.placement import Placement
from conductor.view.transfers import TransferEstimator
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs, batch_share, prefill_quantities
from mooncake.messages.heartbeats import DecodeStats, Heartbeat
from mooncake.messages.workers import Role

COSTS_HOLD_S = 30.0
"""Seconds without a measured iteration after which a decode instance's costs are stale.

An idle instance with stale costs is assumed to be as quick as the quickest of its kind.
"""


@dataclass(slots=True)
class _Occupant:
    """The instance in a slot, and the measurements from which the instance's costs are learned."""

    instance: Instance
    prefill_checked_s: float
    """The time at which the duration of a prefill was last compared with its prediction."""
    decode_checked_s: float
    """The time at which the instance's costs were last learned from iterations."""
    has_stale_decode_costs: bool = False
    """Whether, at the newest heartbeat, `decode_checked_s` was more than `COSTS_HOLD_S` ago."""
    decode: DecodeStats = field(default_factory=DecodeStats)
    computed: PrefillPass | None = None


class ClusterView:
    """The knowledge of all instances, in arrays by instance slot: prefixes, loads, costs, traffic.

    `next_iteration_s`, `next_token_s` and `next_delay` predict decode of each instance if it gets one more
    request, for line 24 of Algorithm 1. If the prompt of that request has n tokens, an iteration takes
    `next_iteration_s + n * next_token_s` seconds, and the TBT is `next_delay` times as long.

    Args:
        settings: The settings of decisions, such as the balancing threshold and the forecast's level.
        profiled: Measured costs of prefill and of decode to begin with; None for generic ones.
    """

    next_iteration_s: Floats
    """Predicted seconds of an iteration with one more request, without the tokens of its prompt."""
    next_token_s: Floats
    """Seconds that each token of the further request's prompt adds."""
    next_delay: Floats
    """The TBT of the further request, in iterations: 1 while a batch slot is free."""

    def __init__(
        self, settings: PolicySettings | None = None, profiled: tuple[Costs, Costs] | None = None
    ) -> None:
        self._settings = settings = settings or PolicySettings()
        prefill, decode = profiled or (GENERIC_PREFILL_COSTS, GENERIC_DECODE_COSTS)
        self._is_profiled = profiled is not None
        self.prefixes = PrefixIndex()
        self.coming = ComingPrefixes()
        self.loads = Loads()
        self.prefill_costs = CostEstimator(prefill, PREFILL_DOUBT, is_profiled=profiled is not None)
        self.decode_costs = CostEstimator(decode, DECODE_DOUBT, is_profiled=profiled is not None)
        self.transfers = TransferEstimator()
        self.utilisation = Utilisation()
        self.full_batch_token_s = 0.0
        """Seconds of a decode instance for each token that it draws in a full batch; 0 while unknown."""
        self.balancing = BalancingThreshold(settings.kvcache_balancing_threshold)
        self.forecast = forecast_of(settings.overload)
        self._pairs_ttft_correction, self._inlined_ttft_correction = TTFTCorrection(), TTFTCorrection()
        self.tbt_correction = TBTCorrection()
        self.layout: KVLayout | None = None
        """The block layout of all instances; None before the first one."""
        self.block_bytes = 0
        """The size of a block of `layout` in bytes, kept here because every decision needs it."""
        self._set_next(np.zeros((3, 0)))
        self.num_changes = 0
        """The number of times that the arrays by slot were replaced.

        They are replaced when instances come, leave or change roles.
        """
        self._decode_pool: DecodePool | None = None
        self._occupants: dict[int, _Occupant] = {}
        self._slots: dict[str, int] = {}
        self._slot_of_messenger: dict[str, int] = {}

    def _set_next(self, rows: Floats) -> None:
        """Bind the attributes `next_...` to the rows of a matrix, whose columns are the slots."""
        self._next = rows
        self.next_iteration_s, self.next_token_s, self.next_delay = rows

    def instance_at(self, slot: int) -> Instance:
        """Return the instance in this slot."""
        return self._occupants[slot].instance

    def holds(self, slot: int, instance: Instance) -> bool:
        """Return whether this life of the instance still has the slot."""
        occupant = self._occupants.get(slot)
        return occupant is not None and occupant.instance is instance

    def ttft_correction(self, placement: Placement) -> TTFTCorrection:
        """Return the TTFT correction that applies to a placement.

        Inlined prompts have their own correction, as their errors have other causes than those of pairs:
        chunks are as long as the batch allows, and other requests join the batch meanwhile.
        """
        return self._inlined_ttft_correction if placement.is_inlined else self._pairs_ttft_correction

    def slot_of(self, name: str) -> int | None:
        """Return the slot of a registered instance; None if no instance has this name."""
        return self._slots.get(name)

    # -- instances ----------------------------------------------------------------------------------

    def add(self, instance: Instance, now_s: float) -> None:
        """Add an instance in a free slot.

        Raises ValueError if the instance's name or the name of one of its messengers is taken.
        """
        registration = instance.registration
        messengers = [shard.messenger.instance for shard in registration.shards]
        slot = self.prefixes.add_instance(instance.name, messengers)
        checked_s = now_s if self._is_profiled else -math.inf
        self._occupants[slot], self._slots[instance.name] = _Occupant(instance, checked_s, checked_s), slot
        self._slot_of_messenger |= dict.fromkeys(messengers, slot)
        self.num_changes += 1
        self.layout, self.block_bytes = registration.layout, registration.layout.block_bytes
        self._reset_loads(slot, instance)
        for estimator in (self.prefill_costs, self.decode_costs):
            estimator.reset(slot, instance.kind)
        self.transfers.reset(slot)
        missing = np.zeros((3, self.loads.num_slots - len(self.next_iteration_s)))
        self._set_next(np.append(self._next, missing, axis=1))
        self.decode_changed(slot)

    def _reset_loads(self, slot: int, instance: Instance) -> None:
        """Reset the loads of a slot to those of an instance without requests, in its role."""
        room, max_batch = instance.max_sequence_blocks, instance.registration.capacity.max_batch
        inlines = self._settings.inlines(instance.role)
        # An instance of both roles takes prompts however small its chunks are: no other may exist.
        least = instance.registration.least_chunk_tokens if instance.role is Role.DECODE else 0
        self.loads.reset(slot, instance.role, room, max_batch, inlines=inlines, least_chunk_tokens=least)
        self._decode_pool = None

    def remove(self, instance: Instance) -> None:
        """Remove an instance whose process has ended or was lost."""
        slot = self._slots.pop(instance.name)
        del self._occupants[slot]
        self._slot_of_messenger = {
            name: other for name, other in self._slot_of_messenger.items() if other != slot
        }
        self.prefixes.remove_instance(instance.name)
        self.coming.forget(slot)
        self.num_changes += 1
        self.loads.reset(slot, None)
        for estimator in (self.prefill_costs, self.decode_costs):
            estimator.release(slot)
        self._decode_pool = None
        self.transfers.reset(slot)
        self.utilisation.forget(instance.name)
        self.balancing.forget(slot)

    def close(self, instance: Instance) -> None:
        """Mark an instance as closed to new requests. Its present requests stay."""
        self.loads.set_role(self._slots[instance.name], None)
        self._decode_pool = None
        self._resize_owners(instance)

    def open(self, instance: Instance) -> None:
        """Mark a closed instance as open to new requests."""
        inlines = self._settings.inlines(instance.role)
        slot, room = self._slots[instance.name], instance.max_sequence_blocks
        self.loads.set_role(slot, instance.role, room, inlines=inlines)
        self._decode_pool = None
        self._adopt_costs(slot)
        self._resize_owners(instance)

    def begin_role(self, instance: Instance) -> None:
        """Open a closed instance without requests to the requests of its new role.

        The blocks in its pool stay. Its learned costs stay too, as they depend on its device.
        """
        assert not instance.requests
        slot = self._slots[instance.name]
        self._reset_loads(slot, instance)
        self.num_changes += 1
        self._occupants[slot].computed = None
        self._adopt_costs(slot)

    def _adopt_costs(self, slot: int) -> None:
        """Give an instance that has learned no costs those that instances of the same kind have learned.

        Costs of prefill are adopted if it computes prompts, costs of decode if it decodes.
        """
        loads = self.loads
        if loads.is_prefill.item(slot) or loads.inlines.item(slot):
            self.prefill_costs.adopt(slot)
        if loads.is_decode.item(slot):
            self.decode_costs.adopt(slot)
            self._decode_pool = None
            self.decode_changed(slot)

    def learn(self, instance: Instance, heartbeat: Heartbeat, now_s: float) -> None:
        """Update loads, costs and traffic from the heartbeat of an instance."""
        slot = self._slots[instance.name]
        self._learn_decode(slot, heartbeat.decode, now_s)
        occupant = self._occupants[slot]
        occupant.has_stale_decode_costs = now_s - occupant.decode_checked_s > COSTS_HOLD_S
        self._adopt_costs(slot)
        self.loads.set_awaiting_turn(slot, heartbeat.decode_load.num_awaiting_turn)
        used = self.utilisation.learn(
            instance.name, instance.role, heartbeat, instance.num_device_pages, self.full_batch_token_s, now_s
        )
        self.loads.utilisation[slot] = 0.0 if used is None else used.utilisation
        pools = list(heartbeat.pools.values())
        self.balancing.learn(slot, pools)
        self.transfers.learn(slot, pools, self._slot_of_messenger)
        self.resized(instance)

    def resized(self, instance: Instance) -> None:
        """Set the longest sequence that fits into an instance, by the pools of its latest heartbeat."""
        pools = {} if instance.heartbeat is None else instance.heartbeat.pools
        if pools:
            room_blocks = min(instance.room_blocks(pool) for pool in pools.values())
            self.loads.set_room(self._slots[instance.name], room_blocks)

    def _resize_owners(self, helper: Instance) -> None:
        """Set the longest sequences of the instances whose modules are at a helper that has changed state."""
        for occupant in self._occupants.values():
            if occupant.instance.helper is helper:
                self.resized(occupant.instance)

    def decode_pool(self) -> DecodePool | None:
        """Return the decode instances that take requests; None if there are none."""
        is_decode = self.loads.is_decode
        if self._decode_pool is None and is_decode.any():
            mean_costs = self.decode_costs.mean(is_decode)
            members, num_instances = is_decode.astype(np.float64), int(is_decode.sum())
            mean_max_batch = float(self.loads.max_batch.dot(members)) / num_instances
            self._decode_pool = DecodePool(num_instances, members, mean_costs, mean_max_batch)
        return self._decode_pool

    def mean_iteration_s(self) -> float | None:
        """Return the mean predicted seconds of a decode iteration; None without decode instances."""
        loads, pool = self.loads, self.decode_pool()
        if pool is None:
            return None
        share = loads.share_in_batches(pool.members) / pool.num_instances
        num_requests = float(loads.num_decoding.dot(pool.members))
        num_tokens = float(loads.num_decoding_tokens.dot(pool.members))
        return pool.mean_costs.seconds(share * num_requests, share * num_tokens)

    def mean_prefill_costs(self) -> Costs | None:
        """Return the mean costs of the prefill instances; None if no instance computes prompts.

        Without prefill instances the mean is taken over the instances that inline prompts.
        """
        loads = self.loads
        slots = loads.is_prefill if loads.is_prefill.any() else loads.inlines
        return self.prefill_costs.mean(slots) if slots.any() else None

    def decode_changed(self, slot: int) -> None:
        """Update the predicted iteration of a slot, after a change of its requests or its costs.

        An instance that is wrongly believed to be slow gets no requests, and so cannot show that it is fast.
        So an idle instance with stale costs is predicted to be as quick as the quickest of its kind.
        """
        loads, costs = self.loads, self.decode_costs
        num_others = loads.batch_size.item(slot)
        batched, self.next_delay[slot] = batch_share(num_others + 1, loads.max_batch.item(slot))
        quantities = batched * (num_others + 1), batched * loads.num_kv_tokens.item(slot)
        iteration_s, token_s = costs.predict_s(slot, *quantities), costs.second_s.item(slot)
        if num_others == 0 and self._occupants[slot].has_stale_decode_costs:
            quickest = costs.quickest_alike(slot, *quantities)
            iteration_s = min(iteration_s, costs.predict_s(quickest, *quantities))
            token_s = min(token_s, costs.second_s.item(quickest))
        self.next_iteration_s[slot], self.next_token_s[slot] = iteration_s, batched * token_s

    def next_gap_s(self, slot: int, num_tokens: int) -> float:
        """Predict the mean seconds between two tokens of one more request with a prompt of `num_tokens`.

        The TBT, in contrast, is the mean of the longest gaps only. Where r requests share s < r batch slots,
        each gets a token every r / s iterations.
        """
        batched, _ = batch_share(self.loads.batch_size.item(slot) + 1, self.loads.max_batch.item(slot))
        return (self.next_iteration_s.item(slot) + num_tokens * self.next_token_s.item(slot)) / batched

    def prefill_unchecked_s(self, slot: int, now_s: float) -> float:
        """Return the seconds since a prefill on this instance was last compared with its prediction."""
        return now_s - self._occupants[slot].prefill_checked_s

    # -- what is learned ----------------------------------------------------------------------------

    def prefill_ended(
        self, slot: int, num_tokens: int, num_cached_tokens: int, seconds: float, now_s: float
    ) -> None:
        """Learn the costs of a prefill that has ended.

        `seconds` counts from the prompt's order, or from the end of the instance's previous prefill if that
        was later (`Loads.end_prefill`). It does not include the predicted time of other requests' iterations.

        Prefills of one pass end together and are learned as one. So the latest prefill is learned only when
        the instance has no other ordered prompt, or when a prefill of another pass has ended.
        """
        num_new, num_pairs = prefill_quantities(num_tokens - num_cached_tokens, num_cached_tokens)
        occupant = self._occupants[slot]
        occupant.prefill_checked_s = now_s
        before, occupant.computed = occupant.computed, PrefillPass(num_new, num_pairs, seconds, now_s)
        if before is not None:
            predicted_s = self.prefill_costs.predict_s(slot, num_new, num_pairs)
            if before.is_that_of(now_s, predicted_s):
                occupant.computed = before.with_another(occupant.computed)
            else:
                self._learn_prefill(slot, before)
        if not self.loads.has_ordered_prefills(slot):
            self._learn_prefill(slot, occupant.computed)
            occupant.computed = None

    def decode_refused(self, slot: int, num_requests: int, tbt_s: float) -> float:
        """Learn the TBT that a decode instance predicts, and return the Conductor's new prediction.

        Args:
            slot: The slot of the instance.
            num_requests: The number of requests that the instance counts, with and without a batch slot.
                Requests that wait for their turn at its double check are not counted.
            tbt_s: The TBT in seconds that the instance predicts.

        Returns:
            The TBT in seconds that the Conductor predicts for this batch, after learning.
        """
        batched, delay = batch_share(num_requests, self.loads.max_batch.item(slot))
        num_kv_tokens = num_requests * self._mean_decoding_tokens(slot)
        self.decode_costs.learn(slot, batched * num_requests, batched * num_kv_tokens, tbt_s / delay)
        self._decode_pool = None
        self.decode_changed(slot)
        return self.tbt_s(slot, num_requests, num_kv_tokens)

    def tbt_s(self, slot: int, num_requests: float, num_kv_tokens: float) -> float:
        """Predict the TBT in seconds of an instance's batch with these numbers of requests and KV tokens."""
        batched, delay = batch_share(num_requests, self.loads.max_batch.item(slot))
        return delay * self.decode_costs.predict_s(slot, batched * num_requests, batched * num_kv_tokens)

    def assigned_tbt_s(self, slot: int, num_requests: int) -> float:
        """Predict the TBT in seconds of `num_requests` requests with the instance's mean prompt."""
        return self.tbt_s(slot, num_requests, num_requests * self._mean_assigned_tokens(slot))

    def _mean_assigned_tokens(self, slot: int) -> float:
        """Return the mean prompt length of the instance's requests, whether or not their decode has begun."""
        return self.loads.num_kv_tokens.item(slot) / max(1.0, self.loads.batch_size.item(slot))

    def _mean_decoding_tokens(self, slot: int) -> float:
        """Return the mean prompt length of the requests whose prefill has ended.

        Queued prompts do not count here, as they can be much longer.
        """
        return self.loads.num_decoding_tokens.item(slot) / max(1.0, self.loads.num_decoding.item(slot))

    def _learn_prefill(self, slot: int, computed: PrefillPass) -> None:
        if computed.seconds > 0:
            self.prefill_costs.learn(slot, computed.num_new_tokens, computed.num_pairs, computed.seconds)

    def _learn_decode(self, slot: int, decode: DecodeStats, now_s: float) -> None:
        """Learn decode costs from the iterations since the last heartbeat.

        Iterations that also computed a chunk of a prompt do not count.
        """
        occupant = self._occupants[slot]
        before, occupant.decode = occupant.decode, decode
        plain = plain_iterations(before, decode)
        if plain is not None and self.loads.num_decoding[slot] > 0:
            num_kv_tokens = plain.batch_size * self._mean_decoding_tokens(slot)
            self.decode_costs.learn(slot, plain.batch_size, num_kv_tokens, plain.iteration_s)
            occupant.decode_checked_s = now_s
