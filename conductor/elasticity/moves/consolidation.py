"""Consolidation: the requests of one instance move to other instances, so that it is free for another use.

In Llumnix (OSDI 2024, section 4.4) an instance that is to end, or is wanted for another use, counts as full,
so its requests are moved away. Here requests are consolidated only if an instance is wanted empty. Otherwise
the next requests would be placed there at once, as an empty instance has the least TBT.

Owns: the check whether an instance can be emptied. Does not know: who wants an empty instance, how requests
move.
"""

from dataclasses import replace

from conductor.elasticity.moves.batches import InstanceBatch, destination_of, moved


def can_be_emptied(source: InstanceBatch, batches: list[InstanceBatch]) -> bool:
    """Return whether all requests that `source` decodes fit into the other batches without breaking an SLO.

    Long requests are assigned first, as they fit on fewer instances. Coming requests do not count on any
    instance: when they are decoded, other requests will have ended.
    """
    batches = [replace(batch, coming=()) for batch in batches]
    for resident in sorted(source.residents, key=lambda of: -of.num_tokens):
        if not resident.may_move:
            return False
        destination = destination_of(resident, batches, source.instance, share=1.0)
        if destination is None:
            return False
        batches = moved(batches, resident, source.instance, destination.instance)
    return True
