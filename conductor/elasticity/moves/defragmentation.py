"""Defragmentation: short requests move away, so that a long request finds device pages on one instance.

The free pages of a cluster may suffice for a request that fits on none of its instances (Llumnix, OSDI 2024,
section 4.4). Requests are moved away from the instance at which the long request waits until it fits there.

Owns: this rule. Does not know: how often requests may move, how they move.
"""

from conductor.elasticity.moves.batches import Coming, InstanceBatch, destination_of, moved
from conductor.elasticity.moves.limits import Move
from conductor.view.decision_stats import MigrationReason

LEAST_WAIT_S = 2.0
"""Seconds for which a request waits before other requests move for it. Most get pages without a move."""


def defragment(batches: list[InstanceBatch]) -> list[Move]:
    """Return the moves that free device pages for the longest waiting prompt of each instance.

    There are no moves for an instance if moves cannot free enough pages there.
    """
    moves = []
    for source in batches:
        waiting = _waiting(source)
        if waiting is not None:
            moved_here = _make_room(source, waiting, batches)
            for move in moved_here:
                resident = next(of for of in source.residents if of.request_id == move.request_id)
                batches = moved(batches, resident, move.source, move.destination)
            moves += moved_here
    return moves


def _waiting(batch: InstanceBatch) -> Coming | None:
    """Return the request with the longest prompt that waits for device pages here; None if none waits."""
    stuck = [
        of
        for of in batch.coming
        if of.has_waited_s > LEAST_WAIT_S and of.num_prompt_tokens > batch.num_free_tokens
    ]
    return max(stuck, key=lambda of: of.num_prompt_tokens, default=None)


def _make_room(source: InstanceBatch, waiting: Coming, batches: list[InstanceBatch]) -> list[Move]:
    """Return a few moves that together free enough pages; none if that is impossible."""
    num_missing, moves = waiting.num_prompt_tokens - source.num_free_tokens, list[Move]()
    movable = sorted((of for of in source.residents if of.may_move), key=lambda of: of.num_tokens)
    while num_missing > 0 and movable:
        enough = [of for of in movable if of.num_tokens >= num_missing]
        resident = enough[0] if enough else movable[-1]
        movable.remove(resident)
        destination = destination_of(resident, batches, source.instance)
        if destination is None:
            continue
        reason = MigrationReason.DEFRAGMENT
        moves.append(Move(resident.request_id, source.instance, destination.instance, reason))
        batches = moved(batches, resident, source.instance, destination.instance)
        num_missing -= resident.num_tokens
    return moves if num_missing <= 0 else []
