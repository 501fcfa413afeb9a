"""Consolidation: the requests of one instance move to the others, so that it is free for something else.

Llumnix (OSDI 2024, section 4.4): an instance that is to end, or is wanted for something else, counts as full,
so its requests are moved away. It is done only for an instance that is wanted empty. Without that, the next
requests would be placed there at once, as a token takes least time on it.

Owns: this rule. Does not know: who wants an empty instance, how requests move.
"""

from conductor.elasticity.batches import Batch, destination_of, moved
from conductor.elasticity.moves import Move
from conductor.view.decision_stats import MigrationReason


def consolidate(batches: list[Batch], source: Batch, reason: MigrationReason) -> list[Move] | None:
    """The moves that empty `source`; None if some request cannot go without breaking an SLO elsewhere.

    Long requests are given a place first, as they fit in fewer places.
    """
    moves = []
    for resident in sorted(source.residents, key=lambda of: -of.num_tokens):
        destination = None
        if resident.may_move:
            destination = destination_of(resident, batches, source.instance, share=1.0)
        if destination is None:
            return None
        why = f"{source.instance} is wanted empty: {len(source.residents)} requests"
        moves.append(Move(resident.request_id, source.instance, destination.instance, reason, why))
        batches = moved(batches, resident, source.instance, destination.instance)
    return moves


def least_to_move(batches: list[Batch]) -> Batch | None:
    """The batch that costs least to empty: the fewest tokens of KVCache; None without batches."""
    return min(batches, key=lambda batch: sum(of.num_tokens for of in batch.residents), default=None)
