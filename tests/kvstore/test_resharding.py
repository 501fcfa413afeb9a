"""Blocks that travel between groups of pools which are split differently."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messenger.transport.transports import Transport
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import PoolShard
from tests.examples import num_examples
from tests.kvstore.members import WHOLE, Member, members, split
from tests.kvstore.nodes import prompt_keys
from tests.leaks import unseen_exceptions as unseen_exceptions
from tests.messenger import fake_rdma
from tests.messenger.fabric import until
from tests.messenger.fake_rdma import FakeNetwork, device
from tests.messenger.proxy import Plan

KEYS = prompt_keys(3)
TRANSPORTS = [Transport.SHM, Transport.TCP]
WIDE = KVLayout(num_layers=2, num_kv_heads=6, head_dim=128, block_size=64, dtype="bfloat16")
"""a head of a layer has 32 KiB: several frames, and large enough to be received in pieces"""

RANKS_2 = split(WHOLE, [], [3])
RANKS_3 = split(WHOLE, [], [2, 4])
STAGES_2 = split(WHOLE, [3], [])


class Splits(NamedTuple):
    """Of two groups."""

    source: list[KVLayout]
    target: list[KVLayout]


def cuts(stop: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, stop - 1), max_size=most).map(sorted)


def groups(whole: KVLayout) -> st.SearchStrategy[Splits]:
    one = st.tuples(cuts(whole.num_layers, 1), cuts(whole.num_kv_heads, 2)).map(lambda at: split(whole, *at))
    return st.builds(Splits, one, one)


def shards(sources: Sequence[Member]) -> list[PoolShard]:
    return [PoolShard(source.address, source.layout) for source in sources]


async def send_all(sources: Sequence[Member], targets: Sequence[Member], keys: Sequence[bytes]) -> None:
    """Every source to every target, layer by layer. Raises TransferError."""
    arrivals, sends = [], []
    reservations = [source.reserve(keys) for source in sources]
    receptions = [target.reserve(keys) for target in targets]
    for target, reception in zip(targets, receptions, strict=True):
        grant = target.grants.grant(reception)
        arrivals.append(target.grants.wait_arrived(reception))
        sends += [
            source.send(reservation, grant) for source, reservation in zip(sources, reservations, strict=True)
        ]
    for source, reservation in zip(sources, reservations, strict=True):
        for layer in range(source.layout.num_layers):
            if not all(block.found for block in reservation.blocks):
                source.write(reservation, range(layer, layer + 1))
            for send, _ in sends:
                send.wake()
            await asyncio.sleep(0)
    try:
        await asyncio.gather(*arrivals, *(send.outcome for send, _ in sends))
    finally:
        for _, task in sends:
            task.cancel()
            await asyncio.wait([task])
        for source, reservation in zip(sources, reservations, strict=True):
            source.pool.release(reservation.reservation_id)
        for target, reception in zip(targets, receptions, strict=True):
            target.grants.revoke(reception.reservation_id, "released")
            target.pool.release(reception.reservation_id)


async def check_sent(folder: Path, splits: Splits, transport: Transport, whole: KVLayout = WHOLE) -> None:
    layouts = {"source": splits.source, "target": splits.target}
    async with members(folder, layouts, transport, whole=whole) as (sources, targets):
        await send_all(sources, targets, KEYS)
        for target in targets:
            target.assert_holds(KEYS)
            assert target.traffic.received_bytes[transport] == len(KEYS) * target.layout.block_bytes


async def check_fetched(folder: Path, splits: Splits, transport: Transport, whole: KVLayout = WHOLE) -> None:
    layouts = {"source": splits.source, "target": splits.target}
    async with members(folder, layouts, transport, whole=whole) as (sources, targets):
        for source in sources:
            source.store(KEYS)
        for target in targets:
            heard = await target.fetch(KEYS, shards(sources))
            assert heard[-1] == (len(KEYS), target.layout.num_layers)
            assert heard == sorted(heard)
            target.assert_holds(KEYS)
            assert target.traffic.received_bytes[transport] == len(KEYS) * target.layout.block_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(splits=groups(WHOLE))
@settings(max_examples=num_examples(25))
async def test_any_group_fills_the_grants_of_any_other(transport: Transport, splits: Splits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await check_sent(Path(folder), splits, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(splits=groups(WHOLE))
@settings(max_examples=num_examples(25))
async def test_any_group_fetches_from_any_other(transport: Transport, splits: Splits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await check_fetched(Path(folder), splits, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("check", [check_sent, check_fetched])
async def test_large_parts(tmp_path: Path, transport: Transport, check: object) -> None:
    assert callable(check)
    for number, splits in enumerate(
        (Splits(split(WIDE, [], [3]), [WIDE]), Splits([WIDE], split(WIDE, [1], [2])))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        await check(folder, splits, transport, WIDE)


async def send_over_two_paths(folder: Path, plan: Plan) -> tuple[range, range]:
    """From two ranks to an undivided pool; on one of the paths what `plan` says happens to each connection.

    Returns the bytes between which it has carried writes, upwards and downwards.
    """
    layouts = {"source": split(WIDE, [], [3]), "target": [WIDE]}
    async with members(folder, layouts, Transport.TCP, whole=WIDE, num_proxies=2) as (sources, (target,)):
        proxy = target.proxies[0]
        proxy.plans += [plan, plan]
        for source in sources:
            peer = await source.peers.peer(target.address)
            await until(lambda peer=peer: len(peer.lanes) == 2)  # type: ignore[misc]
        begins = {link: (link.num_up, link.num_down) for link in proxy.links}
        await send_all(sources, [target], KEYS)
        target.assert_holds(KEYS)
        busiest = max(begins, key=lambda link: link.num_up)
        up, down = begins[busiest]
        return range(up, busiest.num_up), range(down, busiest.num_down)


async def test_parts_come_again_over_another_path(tmp_path: Path) -> None:
    up, down = await send_over_two_paths(tmp_path, Plan())
    assert len(up) > WIDE.head_bytes
    random = Random(7)
    plans = [Plan(reset_up_at=random.choice(up)) for _ in range(20)]
    plans += [Plan(reset_down_at=random.choice(down)) for _ in range(10)]
    for plan in plans:
        try:
            await send_over_two_paths(tmp_path, plan)
        except BaseException as error:
            error.add_note(f"with {plan}")
            raise


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    return fake_rdma.install(monkeypatch)


@pytest.mark.parametrize(
    "splits", [Splits(RANKS_2, [WHOLE]), Splits([WHOLE], RANKS_2), Splits(RANKS_2, RANKS_3)]
)
async def test_parts_are_written_by_rdma(tmp_path: Path, network: FakeNetwork, splits: Splits) -> None:
    names = "abcdefgh"[: len(splits.source) + len(splits.target)]
    cards = [network.cards(device(name)) for name in names]
    layouts = {"source": splits.source, "target": splits.target}
    async with members(tmp_path, layouts, Transport.RDMA, cards) as (sources, targets):
        await send_all(sources, targets, KEYS)
        for target in targets:
            target.assert_holds(KEYS)


@pytest.mark.parametrize("splits", [Splits(STAGES_2, RANKS_2), Splits(RANKS_2, RANKS_3)])
async def test_parts_are_read_by_rdma(tmp_path: Path, network: FakeNetwork, splits: Splits) -> None:
    names = "abcdefgh"[: len(splits.source) + len(splits.target)]
    cards = [network.cards(device(name)) for name in names]
    layouts = {"source": splits.source, "target": splits.target}
    async with members(tmp_path, layouts, Transport.RDMA, cards) as (sources, targets):
        for source in sources:
            source.store(KEYS)
        for target in targets:
            await target.fetch(KEYS, shards(sources))
            target.assert_holds(KEYS)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("splits", "reason"),
    [
        (Splits([WHOLE], RANKS_2), "page .*, which was to be sent, is damaged"),
        (Splits(RANKS_2, [WHOLE]), "checksum of page .* does not match its bytes"),
    ],
    ids=["part-of-it", "all-of-it"],
)
async def test_damaged_page_is_never_sealed_elsewhere(
    tmp_path: Path, transport: Transport, splits: Splits, reason: str
) -> None:
    layouts = {"source": splits.source, "target": splits.target}
    async with members(tmp_path, layouts, transport) as (sources, targets):
        for source in sources:
            source.store(KEYS)
        last = sources[-1]
        last.damage(KEYS[1], 4, last.layout.layer_bytes - 1)
        with pytest.raises(TransferError, match=reason):
            await send_all(sources, targets, KEYS)
        assert all(target.pool.find(KEYS[1]) is None for target in targets)
        assert last.pool.find(KEYS[1]) is None  # so that the next prompt recomputes it
        for target in targets:
            await target.assert_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "splits",
    [Splits([WHOLE], [WHOLE]), Splits([WHOLE], RANKS_2), Splits(RANKS_2, [WHOLE])],
    ids=["whole", "part-of-it", "all-of-it"],
)
async def test_damaged_page_is_fetched_by_nobody_and_dropped_by_its_holder(
    tmp_path: Path, transport: Transport, splits: Splits
) -> None:
    layouts = {"source": splits.source, "target": splits.target}
    async with members(tmp_path, layouts, transport) as (sources, targets):
        for source in sources:
            source.store(KEYS)
        last = sources[-1]
        last.damage(KEYS[1], 4, last.layout.layer_bytes - 1)
        for target in targets:
            await target.fetch(KEYS, shards(sources))
            target.assert_holds(KEYS[:1])
            assert [target.pool.find(key) for key in KEYS[1:]] == [None, None]
        await until(lambda: last.pool.find(KEYS[1]) is None)  # so that the next prompt recomputes it
        assert last.pool.counters.num_dropped == 1
        assert [source.pool.find(KEYS[2]) is None for source in sources] == [False] * len(sources)


async def test_holder_keeps_a_block_that_was_damaged_on_its_way(tmp_path: Path) -> None:
    layouts, keys = {"source": [WHOLE], "target": [WHOLE]}, KEYS[:1]
    async with members(tmp_path, layouts, Transport.TCP, num_proxies=1) as ((source,), (target,)):
        source.store(keys)
        source.proxies[0].plans.append(Plan(flip_down_at=WHOLE.block_bytes // 2))
        await target.fetch(keys, shards([source]))
        assert target.traffic.num_checksum_failures == 1
        assert target.pool.find(keys[0]) is None
        await target.fetch(keys, shards([source]))
        target.assert_holds(keys)
        assert source.pool.counters.num_dropped == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_group_without_one_of_its_members_is_asked_for_nothing(
    tmp_path: Path, transport: Transport
) -> None:
    async with members(tmp_path, {"source": RANKS_2, "target": [WHOLE]}, transport) as (
        sources,
        (target,),
    ):
        for source in sources:
            source.store(KEYS)
        assert await target.fetch(KEYS, shards(sources[:1])) == []
        assert await target.fetch(KEYS, shards([*sources, sources[0]])) == []
        assert not any(target.traffic.received_bytes.values())
        await target.fetch(KEYS, shards(sources))
        target.assert_holds(KEYS)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("believed", [WHOLE, RANKS_3[0], STAGES_2[1]])
async def test_shard_that_is_not_what_it_was_believed_to_be_costs_only_the_fetch(
    tmp_path: Path, transport: Transport, believed: KVLayout
) -> None:
    layouts = {"source": RANKS_2, "target": [believed]}
    async with members(tmp_path, layouts, transport) as (sources, (target,)):
        for source in sources:
            source.store(KEYS)
        believed_source = PoolShard(sources[1].address, believed)
        assert await target.fetch(KEYS, [believed_source]) == []
        assert not any(target.traffic.received_bytes.values())


async def test_a_source_that_lacks_a_block_ends_the_prefix_for_all(tmp_path: Path) -> None:
    async with members(tmp_path, {"source": RANKS_2, "target": [WHOLE]}, Transport.TCP) as (
        (first, last),
        (target,),
    ):
        first.store(KEYS)
        last.store(KEYS[:2])
        heard = await target.fetch(KEYS, shards([first, last]))
        assert heard[-1] == (2, WHOLE.num_layers)
        target.assert_holds(KEYS[:2])
        assert target.pool.find(KEYS[2]) is None


async def test_a_rank_that_is_lost_ends_the_fetch_from_all(tmp_path: Path) -> None:
    layouts = {"source": split(WIDE, [], [3]), "target": [WIDE]}
    async with members(tmp_path, layouts, Transport.TCP, whole=WIDE, num_proxies=1) as groups:
        sources, (target,) = groups
        for source in sources:
            source.store(KEYS)
        lost = sources[1].proxies[0]
        lost.plans.append(Plan(reset_down_at=WIDE.head_bytes))
        assert await target.fetch(KEYS, shards(sources)) == []
        assert target.pool.find(KEYS[0]) is None
