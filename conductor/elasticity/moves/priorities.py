"""Priority: requests of lower classes leave batches in which a stricter class has little headroom.

A class is the requests with one priority number; the stricter class has the lower number. In Llumnix (OSDI
2024, section 4.3) instances keep headroom for requests of high execution priority; other requests are moved
away as soon as headroom is short. The rule of relief waits until an SLO is missed. This rule moves lower
classes away earlier.

Owns: this rule. Does not know: how often requests may move, how they move.
"""

from conductor.elasticity.moves.batches import InstanceBatch, Resident, destination_of, moved
from conductor.elasticity.moves.limits import Move
from conductor.view.decision_stats import MigrationReason

HEADROOM_SHARE = 0.85
"""The share of a TBT SLO that a batch with requests of a stricter class may fill."""


def keep_headroom(batches: list[InstanceBatch]) -> list[Move]:
    """Return moves that give the strictest class of a batch more headroom.

    From each batch with little headroom one request of a lower class moves to a batch without requests of
    the strictest class or a stricter one.
    """
    moves = []
    for source in batches:
        first, others = _classes(source)
        slos_s = [of.tbt_slo_s for of in first if of.tbt_slo_s is not None]
        if not others or not slos_s or source.full_tbt_s <= HEADROOM_SHARE * min(slos_s):
            continue
        apart = [batch for batch in batches if batch.instance == source.instance or not _has(batch, first[0])]
        for resident in sorted(others, key=lambda of: (-of.priority, of.num_tokens)):
            destination = destination_of(resident, apart, source.instance)
            if destination is None:
                continue
            reason = MigrationReason.PRIORITY
            moves.append(Move(resident.request_id, source.instance, destination.instance, reason))
            batches = moved(batches, resident, source.instance, destination.instance)
            break
    return moves


def _classes(batch: InstanceBatch) -> tuple[list[Resident], list[Resident]]:
    """Return the batch's requests with the lowest priority number, and its other requests that may move."""
    least = min((of.priority for of in batch.residents), default=0)
    first = [of for of in batch.residents if of.priority == least]
    return first, [of for of in batch.residents if of.priority > least and of.may_move]


def _has(batch: InstanceBatch, resident: Resident) -> bool:
    """Return whether the batch has requests with the resident's priority number or a lower one."""
    return any(of.priority <= resident.priority for of in batch.residents)
