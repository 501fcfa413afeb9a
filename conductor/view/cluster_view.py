"""What the Conductor believes about its instances, kept up by events and read by every decision.

Owns: which instance has which slot; prefixes, loads, learned costs and traffic by slot. Does not know: how
anything is decided, sockets, the clock.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conductor.balancing import START, BalancingThreshold
from conductor.index.prefix_index import PrefixIndex
from conductor.view.estimators import (
    DECODE_DOUBT,
    GENERIC_DECODE_COSTS,
    GENERIC_PREFILL_COSTS,
    PREFILL_DOUBT,
    CostEstimator,
    Floats,
)
from conductor.view.instances import Instance
from conductor.view.loads import Loads
from conductor.view.transfers import TransferEstimator
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs, prefill_quantities
from mooncake.messages.pools import PoolStats
from mooncake.messages.workers import DecodeStats, Heartbeat

_SAME_PASS = 0.2
"""prefills that end so close together, in their predicted times, were computed together"""


class _Computed(NamedTuple):
    """Prefills that one instance has computed together, or one."""

    num_new_tokens: float
    num_pairs: float
    seconds: float
    ended_s: float

    def with_another(self, other: "_Computed") -> "_Computed":
        """Both; `other` ended later."""
        return _Computed(
            self.num_new_tokens + other.num_new_tokens,
            self.num_pairs + other.num_pairs,
            self.seconds + other.seconds,
            other.ended_s,
        )


class DecodePool(NamedTuple):
    """All decode instances together."""

    num_instances: int
    are_in: Floats
    """by slot: 1 for each of them, 0 for others"""
    mean_costs: Costs


@dataclass(slots=True)
class _Seat:
    """Who has a slot, and what its costs are learned from."""

    instance: Instance
    checked_s: float
    decode: DecodeStats = field(default_factory=DecodeStats)
    computed: _Computed | None = None


class ClusterView:
    """All slots. `profiled`: measured costs of prefill and decode to begin with. `threshold`: as
    `kvcache_balancing_threshold`."""

    def __init__(self, profiled: tuple[Costs, Costs] | None = None, threshold: float | None = START) -> None:
        prefill, decode = profiled or (GENERIC_PREFILL_COSTS, GENERIC_DECODE_COSTS)
        self._is_profiled = profiled is not None
        self.prefixes = PrefixIndex()
        self.loads = Loads()
        self.prefill_costs = CostEstimator(prefill, PREFILL_DOUBT, is_profiled=profiled is not None)
        self.decode_costs = CostEstimator(decode, DECODE_DOUBT, is_profiled=profiled is not None)
        self.transfers = TransferEstimator()
        self.balancing = BalancingThreshold(threshold)
        self.layout: KVLayout | None = None
        """of all instances; None before the first one"""
        self.block_bytes = 0
        """of that layout, which every decision asks for"""
        self.next_step_s = np.zeros(0)
        """of decode instances, by slot, with one more request that has no tokens yet"""
        self.num_changes = 0
        """how often the arrays by slot have been replaced: when an instance has come or gone"""
        self._decode_pool: DecodePool | None = None
        self._seats: dict[int, _Seat] = {}
        self._slots: dict[str, int] = {}
        self._slot_of_messenger: dict[str, int] = {}

    def instance_at(self, slot: int) -> Instance:
        """Who has this slot."""
        return self._seats[slot].instance

    def holds(self, slot: int, instance: Instance) -> bool:
        """Whether this life still has the slot."""
        seat = self._seats.get(slot)
        return seat is not None and seat.instance is instance

    def slot_of(self, name: str) -> int | None:
        """The slot of a registered instance."""
        return self._slots.get(name)

    # -- instances ----------------------------------------------------------------------------------

    def add(self, instance: Instance, now_s: float) -> None:
        """It has registered. Raises ValueError if a name of it, or of its pools, is taken."""
        registration = instance.registration
        messengers = [shard.messenger.instance for shard in registration.shards]
        slot = self.prefixes.add_instance(instance.name, messengers)
        checked_s = now_s if self._is_profiled else -math.inf
        self._seats[slot], self._slots[instance.name] = _Seat(instance, checked_s), slot
        self._slot_of_messenger |= dict.fromkeys(messengers, slot)
        self.num_changes += 1
        self.layout, self.block_bytes = registration.layout, registration.layout.block_bytes
        self.loads.reset(slot, registration.role, instance.max_sequence_blocks)
        self._decode_pool = None
        for estimator in (self.prefill_costs, self.decode_costs, self.transfers):
            estimator.reset(slot)
        self.next_step_s = np.append(self.next_step_s, np.zeros(self.loads.num_slots - len(self.next_step_s)))
        self.decode_changed(slot)

    def remove(self, instance: Instance) -> None:
        """Its life has ended: nothing of it is remembered."""
        slot = self._slots.pop(instance.name)
        del self._seats[slot]
        self._slot_of_messenger = {
            name: other for name, other in self._slot_of_messenger.items() if other != slot
        }
        self.prefixes.remove_instance(instance.name)
        self.num_changes += 1
        self.loads.reset(slot, None)
        self._decode_pool = None
        self.transfers.reset(slot)
        self.balancing.forget(slot)

    def close(self, instance: Instance) -> None:
        """It is given nothing more; what it has stays."""
        self.loads.set_role(self._slots[instance.name], None)
        self._decode_pool = None

    def open(self, instance: Instance) -> None:
        """Undoes `close`."""
        room_blocks = instance.max_sequence_blocks
        self.loads.set_role(self._slots[instance.name], instance.registration.role, room_blocks)
        self._decode_pool = None

    def heard(self, instance: Instance, heartbeat: Heartbeat) -> None:
        """Its load, as it says."""
        slot = self._slots[instance.name]
        self._learn_decode(slot, heartbeat.decode)
        self.loads.hear_turns(slot, heartbeat.decode_load.num_awaiting_turn)
        num_device_pages = max(1, instance.registration.capacity.num_device_pages)
        self.loads.memory_usage[slot] = 1 - heartbeat.num_free_device_pages / num_device_pages
        pools = list(heartbeat.pools.values())
        self.balancing.heard(slot, pools)
        self.transfers.heard(slot, pools, self._slot_of_messenger)
        if pools:
            self.loads.set_room(slot, min(_room_blocks(instance, pool) for pool in pools))

    def decode_pool(self) -> DecodePool | None:
        """All decode instances; None if there is none."""
        is_decode = self.loads.is_decode
        if self._decode_pool is None and is_decode.any():
            mean_costs = self.decode_costs.mean(is_decode)
            self._decode_pool = DecodePool(int(is_decode.sum()), is_decode.astype(np.float64), mean_costs)
        return self._decode_pool

    def mean_step_s(self) -> float | None:
        """Of all decode instances, with what is in their batches now; None without one."""
        loads, pool = self.loads, self.decode_pool()
        if pool is None:
            return None
        share = loads.share_in_batches(pool.are_in) / pool.num_instances
        num_requests = float(loads.num_decoding.dot(pool.are_in))
        num_tokens = float(loads.num_decoding_tokens.dot(pool.are_in))
        return pool.mean_costs.seconds(share * num_requests, share * num_tokens)

    def mean_prefill_costs(self) -> Costs | None:
        """Of all prefill instances; None without one."""
        is_prefill = self.loads.is_prefill
        return self.prefill_costs.mean(is_prefill) if is_prefill.any() else None

    def decode_changed(self, slot: int) -> None:
        """Other requests are assigned to it, or a step takes another time."""
        loads = self.loads
        self.next_step_s[slot] = self.decode_costs.predict_s(
            slot, loads.batch_size.item(slot) + 1, loads.num_kv_tokens.item(slot)
        )

    def prefill_unchecked_s(self, slot: int, now_s: float) -> float:
        """For how long no prefill has shown whether its costs here are predicted well."""
        return now_s - self._seats[slot].checked_s

    # -- what is learned ----------------------------------------------------------------------------

    def prefill_ended(
        self, slot: int, num_tokens: int, num_cached_tokens: int, seconds: float, now_s: float
    ) -> None:
        """A prefill took so long behind those before it.

        What shared a pass ends together, and is learned from as one, so the last one is kept while more are
        ordered.
        """
        num_new, num_pairs = prefill_quantities(num_tokens - num_cached_tokens, num_cached_tokens)
        seat = self._seats[slot]
        seat.checked_s = now_s
        before, seat.computed = seat.computed, _Computed(num_new, num_pairs, seconds, now_s)
        if before is not None:
            predicted_s = self.prefill_costs.predict_s(slot, num_new, num_pairs)
            if now_s - before.ended_s < _SAME_PASS * predicted_s:
                seat.computed = before.with_another(seat.computed)
            else:
                self._learn_prefill(slot, before)
        if not self.loads.has_ordered_prefills(slot):
            self._learn_prefill(slot, seat.computed)
            seat.computed = None

    def decode_refused(self, slot: int, batch_size: int, tbt_s: float) -> float:
        """It predicts this for so many requests: others that have been prefilled wait for their turn. What is
        predicted here, after learning from it."""
        num_kv_tokens = batch_size * self._mean_kv_tokens(slot)
        self.decode_costs.learn(slot, batch_size, num_kv_tokens, tbt_s)
        self._decode_pool = None
        self.decode_changed(slot)
        return self.step_s(slot, batch_size)

    def step_s(self, slot: int, batch_size: int) -> float:
        """Predicted for so many requests of the length of those that the instance has."""
        return self.decode_costs.predict_s(slot, batch_size, batch_size * self._mean_kv_tokens(slot))

    def _mean_kv_tokens(self, slot: int) -> float:
        return self.loads.num_kv_tokens.item(slot) / max(1.0, self.loads.batch_size.item(slot))

    def _learn_prefill(self, slot: int, computed: _Computed) -> None:
        if computed.seconds > 0:
            self.prefill_costs.learn(slot, computed.num_new_tokens, computed.num_pairs, computed.seconds)

    def _learn_decode(self, slot: int, decode: DecodeStats) -> None:
        seat, loads = self._seats[slot], self.loads
        num_steps = decode.num_iterations - seat.decode.num_iterations
        num_tokens = decode.num_tokens - seat.decode.num_tokens
        seconds = decode.forward_s - seat.decode.forward_s
        seat.decode = decode
        if min(num_steps, num_tokens, seconds) > 0 and loads.batch_size[slot] > 0:
            batch_size = num_tokens / num_steps
            num_kv_tokens = batch_size * self._mean_kv_tokens(slot)
            self.decode_costs.learn(slot, batch_size, num_kv_tokens, seconds / num_steps)
            self._decode_pool = None
            self.decode_changed(slot)


def _room_blocks(instance: Instance, pool: PoolStats) -> int:
    """What a sequence finds when the requests assigned here have ended: without what others use."""
    layout = instance.registration.layout
    num_assigned = sum(layout.num_blocks(num_tokens) for num_tokens in instance.requests.values())
    num_used_by_others = max(0, pool.num_used + pool.num_quarantined - num_assigned)
    return min(instance.max_sequence_blocks, pool.num_pages - num_used_by_others)
