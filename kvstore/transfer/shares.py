"""Split of this pool's blocks between the shards of a group of pools.

A group (the stages of a pipeline, the ranks of a tensor-parallel group) holds each block as several shards,
one in each member's pool. Whoever fetches a block from a group asks each member for what it has of one's own
shard.

Owns: that arithmetic. Does not know: connections, whether a member has what it should.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout, common
from mooncake.messages.pools import MessengerAddress, PoolShard


class Share(NamedTuple):
    """The share of one member in this pool's shard. Layers and heads are the model's."""

    messenger: MessengerAddress
    layers: range
    heads: range
    has_same_heads: bool
    """Set if the member has the heads that this pool has: then its layers are one range with the next ones,
    at both ends."""


def shares(ours: KVLayout, group: Sequence[PoolShard]) -> list[Share]:
    """Compute the share of each member. Raises TransferError unless every head of every layer of `ours` is in
    exactly one shard of `group`."""
    found = []
    for shard in group:
        theirs = shard.layout
        layers, heads = common(ours.layers, theirs.layers), common(ours.heads, theirs.heads)
        if layers and heads:
            found.append(Share(shard.messenger, layers, heads, theirs.heads == ours.heads))
    for one, other in combinations(found, 2):
        if common(one.layers, other.layers) and common(one.heads, other.heads):
            names = f"{one.messenger.instance} and {other.messenger.instance}"
            raise TransferError(
                f"{names} both have heads {one.heads} of layers {one.layers}, or some of them"
            )
    if sum(len(share.layers) * len(share.heads) for share in found) != ours.num_layers * ours.num_kv_heads:
        names = ", ".join(shard.messenger.instance for shard in group)
        raise TransferError(
            f"layers {ours.layers} with heads {ours.heads} are not all in the shards of {names}"
        )
    return found


def steps(ours: KVLayout, from_shares: Sequence[Share], num_at_once: int) -> Iterator[range]:
    """Yield the positions of all layers, in order, up to `num_at_once` together.

    Of layers together each share has all or none as one range.
    """
    if not all(share.has_same_heads for share in from_shares):
        num_at_once = 1
    edges = {ours.layers.start, ours.layers.stop, *(share.layers.start for share in from_shares)}
    for begin, end in pairwise(sorted(edge - ours.first_layer for edge in edges)):
        for first in range(begin, end, num_at_once):
            yield range(first, min(first + num_at_once, end))
