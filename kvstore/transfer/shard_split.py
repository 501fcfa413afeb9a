"""The split of this pool's blocks between the shards of a group of pools.

A group (the stages of a pipeline, the ranks of a tensor-parallel group) holds each block as several shards,
one in each member's pool. A messenger that fetches a block from a group asks each member for the overlap of
the member's shard with the messenger's own shard.

Owns: the arithmetic of the split. Does not know: connections, which blocks a member has.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout, common
from mooncake.messages.pools import MessengerAddress, PoolShard


class Overlap(NamedTuple):
    """The layers and heads of this pool's shard that one member has, numbered as in the model."""

    messenger: MessengerAddress
    layers: range
    heads: range
    has_same_heads: bool
    """Whether the member has the same heads as this pool.

    If so, consecutive layers are one byte range in both pools.
    """


def overlaps(ours: KVLayout, group: Sequence[PoolShard]) -> list[Overlap]:
    """Return the overlaps of this pool's shard with the members' shards.

    Members without an overlap are left out. Raises TransferError unless every head of every layer of `ours`
    is in exactly one shard of `group`.
    """
    found = []
    for shard in group:
        theirs = shard.layout
        layers, heads = common(ours.layers, theirs.layers), common(ours.heads, theirs.heads)
        if layers and heads:
            found.append(Overlap(shard.messenger, layers, heads, theirs.heads == ours.heads))
    for one, other in combinations(found, 2):
        if common(one.layers, other.layers) and common(one.heads, other.heads):
            names = f"{one.messenger.instance} and {other.messenger.instance}"
            raise TransferError(
                f"{names} both have heads {one.heads} of layers {one.layers}, or some of them"
            )
    num_found = sum(len(overlap.layers) * len(overlap.heads) for overlap in found)
    if num_found != ours.num_layers * ours.num_kv_heads:
        names = ", ".join(shard.messenger.instance for shard in group)
        raise TransferError(
            f"layers {ours.layers} with heads {ours.heads} are not all in the shards of {names}"
        )
    return found


def steps(ours: KVLayout, found: Sequence[Overlap], num_at_once: int) -> Iterator[range]:
    """Yield the positions of all layers, in order, up to `num_at_once` in each step.

    An overlap has all layers of a step, as one byte range, or none of them.
    """
    if not all(overlap.has_same_heads for overlap in found):
        num_at_once = 1
    edges = {ours.layers.start, ours.layers.stop, *(overlap.layers.start for overlap in found)}
    for begin, end in pairwise(sorted(edge - ours.first_layer for edge in edges)):
        for first in range(begin, end, num_at_once):
            yield range(first, min(first + num_at_once, end))
