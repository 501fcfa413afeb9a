"""Who of a group has what."""

from collections.abc import Sequence

import pytest

from kvstore.transfer.shard_split import overlaps, steps
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress, PoolShard

WHOLE = KVLayout(num_layers=8, num_kv_heads=6, head_dim=8, block_size=4, dtype="bfloat16")


def shard(layers: range = WHOLE.layers, heads: range = WHOLE.heads) -> KVLayout:
    return WHOLE.of_layers(layers).of_heads(heads)


def group(*layouts: KVLayout) -> list[PoolShard]:
    return [
        PoolShard(MessengerAddress(f"p{number}", 1, "host", "", ()), layout)
        for number, layout in enumerate(layouts)
    ]


def test_each_member_is_asked_for_what_it_has_of_ours() -> None:
    ours = shard(range(2, 8), range(1, 4))
    found = overlaps(
        ours, group(shard(range(4)), shard(range(4, 8), range(3)), shard(range(4, 8), range(3, 6)))
    )
    assert [
        (overlap.messenger.instance, overlap.layers, overlap.heads, overlap.has_same_heads)
        for overlap in found
    ] == [
        ("p0", range(2, 4), range(1, 4), False),
        ("p1", range(4, 8), range(1, 3), False),
        ("p2", range(4, 8), range(3, 4), False),
    ]


def test_members_that_have_nothing_of_ours_are_left_alone() -> None:
    found = overlaps(shard(range(4)), group(shard(range(4)), shard(range(4, 8))))
    assert [(overlap.messenger.instance, overlap.has_same_heads) for overlap in found] == [("p0", True)]


@pytest.mark.parametrize(
    "layouts",
    [
        [],
        [shard(range(7))],
        [shard(range(4)), shard(range(5, 8))],
        [shard(heads=range(2)), shard(heads=range(3, 6))],
        [shard(range(4)), shard(range(4, 8), range(5))],
    ],
)
def test_group_that_lacks_something_is_refused(layouts: Sequence[KVLayout]) -> None:
    with pytest.raises(TransferError, match="are not all in the shards"):
        overlaps(WHOLE, group(*layouts))


@pytest.mark.parametrize(
    "layouts",
    [
        [WHOLE, WHOLE],
        [shard(range(5)), shard(range(4, 8))],
        [shard(heads=range(4)), shard(heads=range(3, 6))],
        [shard(range(4)), shard(range(3, 8), range(1)), shard(range(4, 8), range(1, 6))],
    ],
)
def test_group_that_has_something_twice_is_refused(layouts: Sequence[KVLayout]) -> None:
    with pytest.raises(TransferError, match="both have"):
        overlaps(WHOLE, group(*layouts))


def test_layers_come_together_only_where_they_are_one_range() -> None:
    def positions(ours: KVLayout, *layouts: KVLayout) -> list[tuple[int, int]]:
        return [(at.start, at.stop) for at in steps(ours, overlaps(ours, group(*layouts)), 3)]

    assert positions(WHOLE, WHOLE) == [(0, 3), (3, 6), (6, 8)]
    assert positions(WHOLE, shard(range(5)), shard(range(5, 8))) == [(0, 3), (3, 5), (5, 8)]
    assert positions(shard(range(2, 8)), shard(range(5)), shard(range(5, 8))) == [(0, 3), (3, 6)]
    ranks = shard(heads=range(3)), shard(heads=range(3, 6))
    assert positions(WHOLE, *ranks) == [(layer, layer + 1) for layer in range(8)]
    assert positions(ranks[0], WHOLE) == [(layer, layer + 1) for layer in range(8)]
    assert positions(ranks[0], *ranks) == [(0, 3), (3, 6), (6, 8)]
