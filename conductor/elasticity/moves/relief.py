"""Relief: an instance that misses the strictest TBT SLO of its batch moves away its cheapest request.

In Llumnix (OSDI 2024, section 4.4) "load balancing" pairs the least free instances with the most free ones.
Requests of low priority and short sequences move first, as the time of a copy grows with the sequence. Here
an instance is a source only if it is predicted to miss an SLO, and the cost of a copy is its number of
tokens.

Owns: this rule. Does not know: how often requests may move, how they move.
"""

from conductor.elasticity.moves.batches import InstanceBatch, Resident, destination_of, moved
from conductor.elasticity.moves.limits import Move
from conductor.view.decision_stats import MigrationReason


def relieve(batches: list[InstanceBatch]) -> list[Move]:
    """Return the move of one request from each batch that misses an SLO, largest miss first."""
    moves = []
    for source in sorted(filter(lambda batch: batch.is_late, batches), key=_lateness, reverse=True):
        found = _cheapest(source, batches)
        if found is None:
            continue
        resident, destination = found
        reason = MigrationReason.RELIEVE
        moves.append(Move(resident.request_id, source.instance, destination.instance, reason))
        batches = moved(batches, resident, source.instance, destination.instance)
    return moves


def _cheapest(source: InstanceBatch, batches: list[InstanceBatch]) -> tuple[Resident, InstanceBatch] | None:
    """Return the request whose move costs least, and its destination; None if no move is possible.

    A request whose move alone ends the miss is preferred, even if the move of another request is cheaper.
    """
    by_cost = sorted((of for of in source.residents if of.may_move), key=_cost)
    enough = [of for of in by_cost if not source.without(of).is_late]
    for resident in dict.fromkeys([*enough, *by_cost]):
        destination = destination_of(resident, batches, source.instance)
        if destination is not None:
            return resident, destination
    return None


def _cost(resident: Resident) -> tuple[int, int]:
    return -resident.priority, resident.num_tokens


def _lateness(batch: InstanceBatch) -> float:
    slos_s = [of.tbt_slo_s for of in batch.residents if of.tbt_slo_s is not None]
    return batch.tbt_s / min(slos_s)
