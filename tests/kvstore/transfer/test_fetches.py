"""Blocks that a worker has brought from another messenger's pool."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from kvstore.client.worker_client import WorkerClient
from kvstore.pool import claims
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import Reservation
from kvstore.transfer.fetches import BlockFetch
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.sender.requests import Urgency
from mooncake.config.sections import TransportChoice
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import MessengerAddress, PoolShard
from tests.kvstore.holder import NUM_PIECES, Answer, HandMadeHolder
from tests.kvstore.nodes import (
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    Node,
    StartNode,
    assert_holds,
    block_bytes,
    prompt_keys,
    until,
    unused,
    write_layers,
)

pytestmark = pytest.mark.cluster

ALL_LAYERS = range(LAYOUT.num_layers)
KEYS = prompt_keys(3)


@dataclass
class Fetcher:
    """A worker that fetches, and what it hears."""

    node: Node
    client: WorkerClient
    heard: list[tuple[int, int]] = field(default_factory=list)

    async def fetch(
        self, reservation: Reservation, source: MessengerAddress, blocks: list[int]
    ) -> tuple[list[int], list[int]]:
        return await self.client.fetch(
            reservation.reservation_id, [whole(source)], blocks, lambda *layers: self.heard.append(layers)
        )


@asynccontextmanager
async def fetcher(start_node: StartNode, transport: TransportChoice = "auto") -> AsyncIterator[Fetcher]:
    """After it, nothing is in use."""
    node = start_node("fetcher", transport=transport)
    here = Fetcher(node, await node.connect())
    yield here
    await until(here.client, unused)
    await here.client.close()


def whole(holder: MessengerAddress) -> PoolShard:
    """A pool of undivided blocks."""
    return PoolShard(holder, LAYOUT)


def hand_made(
    decide: dict[int, Answer], keys: list[BlockKey] = KEYS, pause: Callable[[], object] = lambda: None
) -> HandMadeHolder:
    """Answers so when it is asked for these layers."""
    blocks = {key: b"".join(block_bytes(key, layer) for layer in ALL_LAYERS) for key in keys}
    return HandMadeHolder(FINGERPRINT, LAYOUT, blocks, lambda layer: decide.get(layer, Answer.SERVE), pause)


def blocks_of(reservation: Reservation, num_blocks: int) -> Reservation:
    return msgspec.structs.replace(reservation, blocks=reservation.blocks[:num_blocks])


def fetch_of(num_blocks: int, layout: KVLayout) -> BlockFetch:
    """A fetch that only makes requests."""
    keys = prompt_keys(num_blocks)
    blocks = [claims.Block(key, page, 0, False, 0, page) for page, key in enumerate(keys)]
    segment = cast(Segment, SimpleNamespace(layout=layout))
    reservation = claims.PageReservation(1, 1, blocks)
    pool, peers = cast(Pool, None), cast(OutgoingSessions, None)
    return BlockFetch(pool, segment, peers, reservation, range(num_blocks), lambda *layers: None)


def peer_of(frame_bytes: Callable[[], int], num_lanes: int) -> OutgoingSession:
    lanes = [None] * num_lanes
    return cast(OutgoingSession, SimpleNamespace(frame_bytes=lambda urgency: frame_bytes(), lanes=lanes))


@pytest.mark.parametrize(("num_lanes", "layer_parts"), [(1, 1), (2, 2), (16, 4)])
def test_parts_of_a_layer_travel_over_all_connections_at_once(num_lanes: int, layer_parts: int) -> None:
    """However many connections there are, a part has 128 KiB or more."""
    layout = KVLayout(4, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    assert layout.layer_bytes == 64 << 10
    fetch, peer = fetch_of(8, layout), peer_of(lambda: 4 << 20, num_lanes)
    requests = list(fetch._requests([peer], [], Urgency.LATENCY))
    assert [request.layers.start for request in requests] == [
        layer for layer in range(4) for _ in range(layer_parts)
    ]
    of_first = [(request.first, request.end) for request in requests[:layer_parts]]
    size = 8 // layer_parts
    assert of_first == [(first, first + size) for first in range(0, 8, size)]


def test_pieces_become_smaller_as_soon_as_others_are_in_a_hurry() -> None:
    fetch, num_blocks = fetch_of(8, LAYOUT), 4
    peer = peer_of(lambda: num_blocks * LAYOUT.layer_bytes, num_lanes=1)
    requests = fetch._requests([peer], [], Urgency.BULK)
    pieces = [next(requests)]
    num_blocks = 2
    pieces += [next(requests), next(requests)]
    assert [(piece.first, piece.end) for piece in pieces] == [(0, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_fetched_blocks_are_sealed_and_say_so_layer_by_layer(
    start_node: StartNode, transport: TransportChoice
) -> None:
    holder = await start_node("holder", transport=transport).connect()
    stored = await holder.reserve(KEYS, 0)
    await write_layers(holder, stored, KEYS, ALL_LAYERS)
    await holder.release(stored.reservation_id)
    async with fetcher(start_node, transport) as here:
        reservation = await here.client.reserve(prompt_keys(4), 1)
        num_layers, pages = await here.fetch(reservation, holder.address, [0, 1, 2])
        assert num_layers == [len(ALL_LAYERS)] * 3
        assert pages == [block.page for block in reservation.blocks[:3]]
        assert here.heard == [(3, layer + 1) for layer in ALL_LAYERS]
        assert_holds(here.client, blocks_of(reservation, 3), KEYS)
        again = await here.client.reserve(KEYS, 0)
        assert all(block.sealed for block in again.blocks)
        await here.client.release(again.reservation_id)
        assert (await here.fetch(reservation, holder.address, [3]))[0] == [0]  # it has not got that
        await here.client.release(reservation.reservation_id)
    await until(holder, unused)
    await holder.close()


async def test_fetched_layers_are_streamed_on_at_once(start_node: StartNode) -> None:
    """The last layer is on its way only after the decode side has the first one."""
    decode = await start_node("decode").connect()
    with closing(hand_made({3: Answer.HANG})) as holder:
        async with fetcher(start_node, "tcp") as here:
            to = await decode.reserve(KEYS, 0)
            grant = await decode.grant(to.reservation_id)
            reservation = await here.client.reserve(KEYS, 0)
            await here.client.send(reservation.reservation_id, grant, "request 1")
            fetching = asyncio.create_task(here.fetch(reservation, holder.address, [0, 1, 2]))
            num_bytes = 3 * 3 * LAYOUT.layer_bytes
            await until(decode, lambda stats: sum(stats.received_bytes.values()) == num_bytes)
            assert not fetching.done()
            holder.close()
            await fetching
            await here.client.release(reservation.reservation_id)
    await decode.close()


async def test_source_that_is_slow_is_heard_of_before_a_layer_is_there(start_node: StartNode) -> None:
    may_send = threading.Semaphore(0)
    pause = partial(may_send.acquire, timeout=DEADLINE_S)
    with closing(hand_made({1: Answer.IN_PIECES}, pause=pause)) as holder:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            fetching = asyncio.create_task(here.fetch(reservation, holder.address, [0, 1, 2]))
            while not here.heard:
                await asyncio.sleep(0.001)
            for _ in range(NUM_PIECES - 1):
                num_heard = len(here.heard)
                may_send.release()
                while len(here.heard) == num_heard:
                    await asyncio.sleep(0.001)
            assert set(here.heard) == {(3, 1)}
            may_send.release()
            assert (await fetching)[0] == [4, 4, 4]
            assert here.heard[-1] == (3, 4)
            assert_holds(here.client, reservation, KEYS)
            await here.client.release(reservation.reservation_id)


async def test_block_that_is_given_up_is_the_callers_to_write(start_node: StartNode) -> None:
    with closing(hand_made({1: Answer.EVICTED})) as holder:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            num_layers, _ = await here.fetch(reservation, holder.address, [0, 1, 2])
            assert num_layers == [4, 4, 1]
            assert here.heard[-1] == (2, 4)
            last = msgspec.structs.replace(reservation, blocks=reservation.blocks[2:])
            await write_layers(here.client, last, KEYS[2:], range(1, 4))
            stats = await here.client.stats(check_integrity=True)
            assert stats.num_sealed == 3
            assert_holds(here.client, reservation, KEYS)
            await here.client.release(reservation.reservation_id)


async def test_source_that_hangs_keeps_the_old_pages_until_it_is_gone(start_node: StartNode) -> None:
    with closing(hand_made({2: Answer.HANG})) as holder:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            fetching = asyncio.create_task(here.fetch(reservation, holder.address, [0, 1, 2]))
            while (3, 2) not in here.heard:
                await asyncio.sleep(0.001)
            await here.client.stop_fetch(reservation.reservation_id)
            num_layers, pages = await fetching
            assert num_layers == [0, 0, 0]
            assert not {block.page for block in reservation.blocks} & set(pages)
            blocks = [
                msgspec.structs.replace(block, page=page)
                for block, page in zip(reservation.blocks, pages, strict=True)
            ]
            moved = msgspec.structs.replace(reservation, blocks=blocks)
            await write_layers(here.client, moved, KEYS, ALL_LAYERS)
            stats = await here.client.stats(check_integrity=True)
            assert (stats.num_sealed, stats.num_quarantined, stats.integrity) == (3, 3, None)
            await here.client.release(reservation.reservation_id)
            holder.close()


@pytest.mark.parametrize("answer", [Answer.HANG, Answer.DIE])
async def test_release_ends_the_fetch(start_node: StartNode, answer: Answer) -> None:
    with closing(hand_made({1: answer})) as holder:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            fetching = asyncio.create_task(here.fetch(reservation, holder.address, [0, 1, 2]))
            while not here.heard and not fetching.done():  # a holder that dies may end the fetch first
                await asyncio.sleep(0.001)
            await here.client.release(reservation.reservation_id)
            await fetching
            holder.close()


async def test_worker_that_is_gone_leaves_no_fetch_behind(start_node: StartNode) -> None:
    with closing(hand_made({1: Answer.HANG})) as holder:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            fetching = asyncio.create_task(here.fetch(reservation, holder.address, [0, 1, 2]))
            while not here.heard:
                await asyncio.sleep(0.001)
            await here.client.close()
            with pytest.raises(PoolError):
                await fetching
            holder.close()
            here.client = await here.node.connect()


async def test_nobody_at_the_source_is_no_error(start_node: StartNode) -> None:
    holder = hand_made({})
    holder.close()
    async with fetcher(start_node, "tcp") as here:
        reservation = await here.client.reserve(KEYS, 0)
        assert (await here.fetch(reservation, holder.address, [0, 1, 2]))[0] == [0, 0, 0]
        await here.client.release(reservation.reservation_id)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [([3], "private"), ([4], "has 4 blocks"), ([-1], "has 4 blocks"), ([0, 0], "twice")],
)
async def test_what_cannot_be_fetched_is_refused(
    start_node: StartNode, blocks: list[int], reason: str
) -> None:
    async with fetcher(start_node) as here:
        reservation = await here.client.reserve(KEYS, 1)
        with pytest.raises(PoolError, match=reason):
            await here.fetch(reservation, here.client.address, blocks)
        await here.client.release(reservation.reservation_id)


async def test_page_that_is_being_fetched_is_not_the_workers_to_write(start_node: StartNode) -> None:
    with closing(hand_made({1: Answer.HANG})) as holder:
        node = start_node("fetcher", transport="tcp")
        client = await node.connect()
        reservation = await client.reserve(KEYS, 0)
        heard = asyncio.Event()
        fetching = asyncio.create_task(
            client.fetch(
                reservation.reservation_id, [whole(holder.address)], [0, 1, 2], lambda *_: heard.set()
            )
        )
        await heard.wait()
        await client.commit(reservation.reservation_id, range(3, 4), [reservation.blocks[0].page], [[0]])
        await client.closed.wait()
        with pytest.raises(PoolError, match="is not the user's to write"):
            await fetching
        await client.close()


RANKS = [LAYOUT.of_heads(range(1)), LAYOUT.of_heads(range(1, 2))]
STAGES = [LAYOUT.of_layers(range(1)), LAYOUT.of_layers(range(1, LAYOUT.num_layers))]


async def holding(node: Node, layout: KVLayout) -> WorkerClient:
    """A worker whose pool has its shards of all blocks."""
    client = await node.connect(layout=layout)
    stored = await client.reserve(KEYS, 0)
    await write_layers(client, stored, KEYS, range(layout.num_layers))
    await client.release(stored.reservation_id)
    return client


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("shards", "asker"),
    [(STAGES, LAYOUT), (RANKS, LAYOUT), ([LAYOUT], RANKS[1])],
    ids=["from stages", "from ranks", "by a rank"],
)
async def test_blocks_come_from_the_pools_of_a_group(
    start_node: StartNode, transport: TransportChoice, shards: list[KVLayout], asker: KVLayout
) -> None:
    holders = [
        await holding(start_node(f"holder-{number}", transport=transport), shard)
        for number, shard in enumerate(shards)
    ]
    client = await start_node("fetcher", transport=transport).connect(layout=asker)
    reservation = await client.reserve(KEYS, 0)
    sources = [PoolShard(holder.address, shard) for holder, shard in zip(holders, shards, strict=True)]
    heard: list[tuple[int, int]] = []
    num_layers, _ = await client.fetch(
        reservation.reservation_id, sources, [0, 1, 2], lambda *layers: heard.append(layers)
    )
    assert num_layers == [len(ALL_LAYERS)] * 3
    assert heard == [(3, layer + 1) for layer in ALL_LAYERS]
    assert_holds(client, reservation, KEYS)
    await client.release(reservation.reservation_id)
    for each in (*holders, client):
        await until(each, unused)
        await each.close()


async def test_member_of_a_group_that_dies_ends_the_fetch_and_what_had_come_stays(
    start_node: StartNode,
) -> None:
    first = await holding(start_node("holder-0", transport="tcp"), STAGES[0])
    blocks = {key: b"".join(block_bytes(key, layer) for layer in STAGES[1].layers) for key in KEYS}
    with closing(HandMadeHolder(FINGERPRINT, STAGES[1], blocks, lambda _: Answer.DIE)) as last:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            sources = [PoolShard(first.address, STAGES[0]), PoolShard(last.address, STAGES[1])]
            num_layers, _ = await here.client.fetch(
                reservation.reservation_id, sources, [0, 1, 2], lambda *layers: here.heard.append(layers)
            )
            assert num_layers == [1, 1, 1]
            assert here.heard == [(3, 1)]
            await write_layers(here.client, reservation, KEYS, range(1, LAYOUT.num_layers))
            assert_holds(here.client, reservation, KEYS)
            assert (await here.client.stats(check_integrity=True)).num_sealed == 3
            await here.client.release(reservation.reservation_id)
    await first.close()


async def test_rank_that_dies_ends_the_fetch_of_the_layer_whose_other_part_has_come(
    start_node: StartNode,
) -> None:
    first = await holding(start_node("holder-0", transport="tcp"), RANKS[0])
    layers = {key: [block_bytes(key, layer, RANKS[1].heads) for layer in ALL_LAYERS] for key in KEYS}
    blocks = {key: b"".join(parts) for key, parts in layers.items()}
    decide = {2: Answer.DIE}
    holder = HandMadeHolder(FINGERPRINT, RANKS[1], blocks, lambda layer: decide.get(layer, Answer.SERVE))
    with closing(holder) as last:
        async with fetcher(start_node, "tcp") as here:
            reservation = await here.client.reserve(KEYS, 0)
            sources = [PoolShard(first.address, RANKS[0]), PoolShard(last.address, RANKS[1])]
            num_layers, _ = await here.client.fetch(
                reservation.reservation_id, sources, [0, 1, 2], lambda *heard: here.heard.append(heard)
            )
            (num_there,) = set(num_layers)
            assert num_there <= 2  # whatever of the first layers had come
            await write_layers(here.client, reservation, KEYS, range(num_there, LAYOUT.num_layers))
            assert_holds(here.client, reservation, KEYS)
            await here.client.release(reservation.reservation_id)
    await first.close()
