"""The input of the rules of elasticity, read from the Conductor's state.

Owns: the translation of view, registry and heartbeats into values. Does not know: the rules.
"""

from dataclasses import replace

from conductor.elasticity.answers import AnswerKind, RunningAnswer
from conductor.elasticity.moves.batches import Coming, InstanceBatch, Resident
from conductor.elasticity.moves.priorities import HEADROOM_SHARE
from conductor.elasticity.rebalancer import Member
from conductor.membership.modules import Modules
from conductor.performance.model import DecodeCapacity
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.migrations import Migrations
from conductor.requests.registry import Requests
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from conductor.view.migration_costs import num_tokens_so_far
from conductor.view.placement import num_tokens_held
from mooncake.messages.costs import Costs
from mooncake.messages.workers import STAGES, InstanceState, Role

_HEARTBEAT_S = 1.5
"""The largest age in seconds that a heartbeat normally has."""
_SANE = (0.5, 2.0)
"""The range to which the ratio of a heartbeat's TBT to the predicted TBT is cut."""


class Survey:
    """Reads the cluster's state for the rules of elasticity."""

    def __init__(self, requests: Requests, migrations: Migrations, modules: Modules) -> None:
        self._requests, self._migrations, self._modules = requests, migrations, modules
        self._view, self._instances = requests.view, requests.instances

    def batches(self, now_s: float) -> list[InstanceBatch]:
        """Return the batches of all decode instances, as of `now_s`."""
        by_id, view = self._requests.by_id, self._view
        batches = []
        for instance in self._instances:
            slot = view.slot_of(instance.name)
            if instance.role is not Role.PREFILL and slot is not None:
                here = [by_id[request_id] for request_id in instance.requests if request_id in by_id]
                batches.append(self._batch(instance, slot, here, now_s))
        return batches

    def _batch(
        self, instance: Instance, slot: int, here: list[TrackedRequest], now_s: float
    ) -> InstanceBatch:
        own = [of for of in here if of.decode == instance.name]
        decoded = [of for of in own if of.state is RequestState.DECODING]
        waiting = _waiting_for_pages(instance, decoded, now_s)
        residents = tuple(self._resident(of, now_s) for of in decoded if of not in waiting)
        coming = [_coming(of, now_s - (of.placed.decode_began_s or now_s)) for of in waiting]
        coming += [_coming(of) for of in own if of.state is not RequestState.DECODING]
        coming += [_coming(of) for of in here if _moves_to(of, instance)]
        capacity, block_size = instance.registration.capacity, instance.registration.layout.block_size
        num_free_pages = instance.num_device_pages
        if instance.heartbeat is not None:
            num_free_pages = instance.heartbeat.num_free_device_pages
        costs = _costs_at(self._view, slot)
        batch = InstanceBatch(
            instance.name,
            residents,
            costs,
            capacity.max_batch,
            instance.max_sequence_blocks * block_size,
            instance.num_device_pages * block_size,
            num_free_pages * block_size,
            tuple(coming),
            num_tokens_at_helper=instance.num_pages_at_helper * block_size,
            takes_requests=instance.state is InstanceState.SERVING,
        )
        return replace(batch, correction=_measured_by_predicted(instance, batch))

    def _resident(self, tracked: TrackedRequest, now_s: float) -> Resident:
        num_tokens = self._num_tokens(tracked, now_s)
        num_prompt_tokens = tracked.placed.num_tokens
        return Resident(
            tracked.request_id,
            num_prompt_tokens,
            max(0, num_tokens - num_prompt_tokens),
            num_tokens_held(tracked.request, Role.DECODE),
            tracked.slos.tbt_s,
            tracked.request.priority,
            self._migrations.may_move(tracked),
        )

    def members(self, batches: list[InstanceBatch], now_s: float) -> list[Member]:
        """Return all instances as the rebalancer sees them, as of `now_s`."""
        loads, by_name = self._view.loads, {batch.instance: batch for batch in batches}
        queue_s, changeable = loads.queue_s(now_s), self._changeable()
        members = []
        for instance in self._instances:
            slot = self._view.slot_of(instance.name)
            if slot is not None:
                members.append(
                    Member(
                        instance.name,
                        instance.role,
                        instance.state,
                        instance.name in changeable,
                        self._view.utilisation.of(instance.name),
                        float(queue_s[slot]),
                        by_name.get(instance.name),
                    )
                )
        return members

    def _changeable(self) -> set[str]:
        """Return the names of the instances whose role the rebalancer may change.

        Instances with both roles keep them. Owners and helpers of moved modules keep their roles. So does the
        last instance of a role that can hold the cluster's longest sequences.
        """
        instances, longest = self._instances, self._instances.max_sequence_blocks()
        holding = {
            role: {of.name for of in instances.serving(role) if of.max_sequence_blocks >= longest}
            for role in STAGES
        }
        return {
            of.name
            for of in instances
            if of.role is not Role.BOTH
            and of.registration.can_decode
            and not holding[of.role] <= {of.name}
            and not self._modules.why_busy(of)
        }

    def running(self, now_s: float) -> list[RunningAnswer]:
        """Return the answers that are being decoded, with their estimated lengths so far."""
        return [
            answer_of(of, self._num_tokens(of, now_s) - of.request.num_prompt_tokens, now_s)
            for of in self._requests.by_id.values()
            if of.state is RequestState.DECODING
        ]

    def _num_tokens(self, tracked: TrackedRequest, now_s: float) -> int:
        return num_tokens_so_far(self._view, tracked.request, tracked.placed, now_s)

    def may_need_moves(self) -> bool:
        """Return whether a rule of `conductor.elasticity.control.RULES` might ask for a move.

        True if requests wait at a decode instance, or if its measured or predicted TBT is more than
        `HEADROOM_SHARE` of the strictest TBT SLO. In other cases no rule asks for a move. A new rule with
        another reason needs its condition here, or it is not asked. The check is cheap, as it is made twice a
        second, and mostly returns False.
        """
        view, loads = self._view, self._view.loads
        slo_s = self._requests.strictest_tbt_slo_s
        for instance in self._instances:
            slot = view.slot_of(instance.name)
            if instance.role is Role.PREFILL or slot is None or not instance.requests:
                continue
            if instance.heartbeat is not None and instance.heartbeat.num_waiting:
                return True
            load = None if instance.heartbeat is None else instance.heartbeat.decode_load
            measured_s = 0.0 if load is None or load.tbt_s is None else load.tbt_s
            tbt_s = view.tbt_s(slot, loads.batch_size.item(slot), loads.num_kv_tokens.item(slot))
            if slo_s is not None and max(measured_s, tbt_s) > HEADROOM_SHARE * slo_s:
                return True
        return False

    def capacity(self, batches: list[InstanceBatch], tbt_slo_s: float | None) -> DecodeCapacity | None:
        """Return the decode capacity of a mean instance; None if there is no decode instance."""
        pool = self._view.decode_pool()
        if pool is None:
            return None
        num_device_tokens = sum(batch.num_device_tokens for batch in batches) / max(1, len(batches))
        residents = [of for batch in batches for of in batch.residents]
        num_prompt_tokens = sum(of.num_prompt_tokens for of in residents)
        num_tokens = sum(of.num_tokens for of in residents)
        # Costs are learned per prompt token, and so contain the time that output tokens add.
        share = num_prompt_tokens / num_tokens if num_tokens else 1.0
        costs = pool.mean_costs._replace(second_s=share * pool.mean_costs.second_s)
        prefill_costs, layout = self._view.mean_prefill_costs(), self._view.layout
        chunk_s = (
            0.0 if prefill_costs is None or layout is None else prefill_costs.first_s * layout.block_size
        )
        return DecodeCapacity(costs, pool.mean_max_batch, num_device_tokens, tbt_slo_s, chunk_s)


def _moves_to(tracked: TrackedRequest, instance: Instance) -> bool:
    return tracked.migration is not None and tracked.migration.destination.instance is instance


def _coming(tracked: TrackedRequest, has_waited_s: float = 0.0) -> Coming:
    request = tracked.request
    return Coming(
        tracked.request_id, len(request.token_ids), tracked.slos.tbt_s, request.priority, has_waited_s
    )


def _waiting_for_pages(
    instance: Instance, decoded: list[TrackedRequest], now_s: float
) -> list[TrackedRequest]:
    """Return the requests that wait for device pages of this instance.

    The latest heartbeat has the number of requests that are in the batch or wait for the batch's TBT to fall.
    These are assumed to be the requests that began decode first; the later ones wait for pages. Requests that
    may have begun after the heartbeat are left out.
    """
    heartbeat = instance.heartbeat
    if heartbeat is None:
        return []
    began = sorted(
        (of for of in decoded if (of.placed.decode_began_s or 0.0) < now_s - _HEARTBEAT_S),
        key=lambda of: of.placed.decode_began_s or 0.0,
    )
    num_batched = heartbeat.num_running + heartbeat.decode_load.num_awaiting_turn
    return began[num_batched:]


def answer_of(tracked: TrackedRequest, num_tokens: int, at_s: float) -> RunningAnswer:
    """Return the answer of a request that is being or was decoded, with `num_tokens` at time `at_s`.

    Its kind follows from the client's prompt and limit, without the outputs of earlier attempts.
    """
    request, began_s = tracked.request, tracked.placed.decode_began_s
    assert began_s is not None
    kind = AnswerKind.of(request.num_prompt_tokens, request.sampling.max_tokens)
    return RunningAnswer(kind, began_s, num_tokens, at_s)


def _costs_at(view: ClusterView, slot: int) -> Costs:
    costs = view.decode_costs
    return Costs(costs.constant_s.item(slot), costs.first_s.item(slot), costs.second_s.item(slot))


def _measured_by_predicted(instance: Instance, batch: InstanceBatch) -> float:
    """Return the ratio of the latest heartbeat's TBT to the predicted TBT; 1 if they cannot be compared."""
    load = None if instance.heartbeat is None else instance.heartbeat.decode_load
    if load is None or load.tbt_s is None or not batch.residents or load.num_requests != batch.size:
        return 1.0
    predicted_s = batch.full_tbt_s
    least, most = _SANE
    return min(max(load.tbt_s / predicted_s, least), most) if predicted_s > 0 else 1.0
