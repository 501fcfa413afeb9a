"""A worker and its messenger process."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from kvstore.client import worker_calls as calls_module
from kvstore.client.worker_client import WorkerClient
from messenger.wire.checksums import layer_checksums
from mooncake.errors import MismatchError, PoolError, PoolFullError
from mooncake.messages.pools import Tier
from tests.kvstore.nodes import (
    FINGERPRINT,
    LAYOUT,
    StartNode,
    assert_holds,
    open_descriptors,
    prompt_keys,
    until,
    unused,
    write_layers,
)

pytestmark = pytest.mark.cluster

ALL_LAYERS = range(LAYOUT.num_layers)


async def test_committed_blocks_are_found_by_the_next_prompt(start_node: StartNode) -> None:
    client = await start_node("node").connect()
    keys = prompt_keys(3)
    first = await client.reserve(keys, 1)
    assert [block.sealed for block in first.blocks] == [False] * 4
    await write_layers(client, first, [*keys, None], ALL_LAYERS)
    await client.release(first.reservation_id)
    longer = await client.reserve(prompt_keys(4), 0)
    assert [block.sealed for block in longer.blocks] == [True, True, True, False]
    assert_holds(client, msgspec.structs.replace(longer, blocks=longer.blocks[:3]), keys)
    stats = await client.stats(check_integrity=True)
    assert stats.tiers[Tier.DRAM].num_hits == 3
    assert (stats.num_misses, stats.integrity) == ({"absent": 4}, None)
    await client.close()


async def test_checksums_are_in_the_segment_once_commits_are_settled(start_node: StartNode) -> None:
    client = await start_node("node").connect()
    table = client.segment.page_table()
    reservation = await client.reserve(prompt_keys(1), 1)
    await write_layers(client, reservation, [*prompt_keys(1), None], ALL_LAYERS)
    await client.settled()
    for block in reservation.blocks:
        data = client.segment.page_view(block.page)
        assert table.checksums(block.page, ALL_LAYERS) == layer_checksums(data, LAYOUT.layer_bytes)
    await client.close()


async def test_full_pool_is_an_error_until_somebody_releases(start_node: StartNode) -> None:
    client = await start_node("node", num_pages=8).connect()
    first = await client.reserve(prompt_keys(client.num_pages), 0)
    with pytest.raises(PoolFullError, match="1 pages are needed, 0 are free and 0 evictable") as full:
        await client.reserve([], 1)
    waiting = asyncio.create_task(client.wait_for_space(full.value))
    await client.stats(check_integrity=True)  # answered behind the wait
    assert not waiting.done()
    await client.release(first.reservation_id)
    await waiting
    await client.reserve([], 1)
    await client.close()


async def test_space_that_came_before_the_wait_is_not_missed(start_node: StartNode) -> None:
    client = await start_node("node", num_pages=8).connect()
    first = await client.reserve(prompt_keys(client.num_pages), 0)
    with pytest.raises(PoolFullError) as full:
        await client.reserve([], 1)
    await client.release(first.reservation_id)
    await client.wait_for_space(full.value)
    await client.close()


async def test_space_that_came_before_a_larger_request_was_refused_is_not_missed(
    start_node: StartNode,
) -> None:
    client = await start_node("node", num_pages=8).connect()
    first = await client.reserve([], client.num_pages)
    with pytest.raises(PoolFullError) as small:
        await client.reserve([], 1)
    await client.release(first.reservation_id)
    await client.reserve([], 1)
    with pytest.raises(PoolFullError):
        await client.reserve([], client.num_pages)
    await client.wait_for_space(small.value)
    await client.close()


async def test_everything_of_a_closed_worker_is_released_but_its_sealed_blocks_stay(
    start_node: StartNode,
) -> None:
    node = start_node("node")
    client = await node.connect()
    keys = prompt_keys(2)
    sealed = await client.reserve(keys, 0)
    await write_layers(client, sealed, keys, ALL_LAYERS)
    await client.reserve(prompt_keys(3, first_token=1000), 1)
    await client.close()
    client = await node.connect()
    stats = await until(client, lambda stats: stats.num_used == 0)
    assert (stats.num_sealed, stats.num_reservations, stats.integrity) == (2, 0, None)
    await client.close()


async def test_second_worker_is_refused_while_the_first_lives(start_node: StartNode) -> None:
    node = start_node("node")
    first = await node.connect()
    with pytest.raises(PoolError, match=r"serves a live worker already \(incarnation 1\)"):
        await node.connect()
    await first.stats(check_integrity=True)  # undisturbed
    await first.close()
    await (await node.connect()).close()


async def test_other_model_is_refused_by_name(start_node: StartNode) -> None:
    node = start_node("node")
    await (await node.connect()).close()
    with pytest.raises(MismatchError, match=f"ours is another, theirs is {FINGERPRINT}"):
        await node.connect(fingerprint="another")
    wider = msgspec.structs.replace(LAYOUT, block_size=32)
    with pytest.raises(MismatchError, match=r"KV layout differs: .*block_size=32.*block_size=16"):
        await node.connect(layout=wider)
    await (await node.connect()).close()


async def test_prompt_of_4096_blocks_fits_one_message_and_a_larger_one_is_a_typed_error(
    start_node: StartNode,
) -> None:
    client = await start_node("node", num_pages=4100).connect()
    keys = prompt_keys(4096)
    reservation = await client.reserve(keys, 1)
    pages = [block.page for block in reservation.blocks]
    await client.commit(reservation.reservation_id, ALL_LAYERS, pages, [[0] * len(ALL_LAYERS)] * len(pages))
    stats = await client.stats(check_integrity=True)
    assert (stats.num_sealed, stats.num_reserved) == (4096, 1)
    with pytest.raises(PoolError, match="a ReservePages message takes"):
        await client.reserve(keys * 8, 0)
    await client.stats(check_integrity=True)  # undisturbed
    await client.close()


@pytest.mark.parametrize("mistake", ["foreign page", "layer twice", "checksums missing", "layer range"])
async def test_wrong_commit_ends_the_session_with_its_reason(start_node: StartNode, mistake: str) -> None:
    node = start_node("node")
    client = await node.connect()
    reservation = await client.reserve(prompt_keys(1), 0)
    page, layer = reservation.blocks[0].page, range(1)
    commit = reservation.reservation_id
    match mistake:
        case "foreign page":
            await client.commit(commit, layer, [page + 1 if page == 0 else page - 1], [[0]])
        case "layer twice":
            await client.commit(commit, layer, [page], [[0]])
            await client.commit(commit, layer, [page], [[0]])
        case "checksums missing":
            await client.commit(commit, layer, [page], [[]])
        case _:
            await client.commit(commit, range(9, 10), [page], [[0]])
    await client.closed.wait()
    with pytest.raises(PoolError, match=r"ended the session: .*(page|layers|checksums)"):
        await client.stats(check_integrity=True)
    await client.close()
    other = await node.connect()
    stats = await other.stats(check_integrity=True)
    assert (stats.num_used, stats.integrity) == (0, None)
    await other.close()


async def test_commit_of_a_released_reservation_is_ignored(start_node: StartNode) -> None:
    client = await start_node("node").connect()
    reservation = await client.reserve(prompt_keys(1), 0)
    await client.release(reservation.reservation_id)
    await client.release(reservation.reservation_id)
    await client.commit(reservation.reservation_id, range(1), [reservation.blocks[0].page], [[0]])
    stats = await client.stats(check_integrity=True)
    assert (stats.num_sealed, stats.num_reserved) == (0, 0)
    await client.close()


async def test_killed_messenger_fails_pending_calls_and_its_successor_finds_the_sealed_blocks(
    start_node: StartNode,
) -> None:
    node = start_node("node", num_pages=8)
    client = await node.connect()
    keys = prompt_keys(3)
    sealed = await client.reserve(keys, 0)
    await write_layers(client, sealed, keys, ALL_LAYERS)
    torn = await client.reserve(prompt_keys(2, first_token=5000), 1)
    await write_layers(client, torn, [*prompt_keys(2, first_token=5000), None], range(2))
    with pytest.raises(PoolFullError) as full:
        await client.reserve([], client.num_pages)
    waiting = asyncio.create_task(client.wait_for_space(full.value))
    await client.stats(check_integrity=True)
    node.kill()
    with pytest.raises(PoolError, match="messenger of node gone"):
        await waiting
    assert client.closed.is_set()
    with pytest.raises(PoolError, match="messenger of node gone"):
        await client.stats(check_integrity=True)
    await client.close()

    node.start()
    client = await node.connect()
    again = await client.reserve(keys, 0)
    assert [block.sealed for block in again.blocks] == [True] * 3
    assert_holds(client, again, keys)
    lost = await client.reserve(prompt_keys(2, first_token=5000), 1)
    assert not any(block.sealed for block in lost.blocks)
    stats = await client.stats(check_integrity=True)
    assert (stats.num_sealed, stats.num_reserved, stats.integrity) == (3, 3, None)
    await client.close()


async def test_terminated_messenger_removes_its_sockets(start_node: StartNode) -> None:
    node = start_node("node")
    client = await node.connect()
    assert node.socket_files() == {"node.sock", "node-peer.sock"}
    assert node.stop() == 0
    assert node.socket_files() == set()
    await client.closed.wait()
    await client.close()


async def test_connecting_to_nobody_fails_within_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"no messenger of node at .* within 0.05 s"):
        await WorkerClient.connect(
            str(tmp_path / "nobody.sock"),
            instance="node",
            incarnation=1,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            timeout_s=0.05,
        )


@pytest.mark.parametrize("num_steps", range(1, 5))
async def test_cancelled_reserve_leaves_nothing_reserved(start_node: StartNode, num_steps: int) -> None:
    client = await start_node("node").connect()
    reserving = asyncio.create_task(client.reserve(prompt_keys(2), 1))
    for _ in range(num_steps):  # cancelled before it is sent, while it is under way, ...
        await asyncio.sleep(0)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    await until(client, lambda stats: stats.num_misses == {"absent": 2} and stats.num_used == 0)
    await client.close()


async def test_client_leaks_no_descriptor(start_node: StartNode) -> None:
    node = start_node("node")
    await (await node.connect()).close()
    before = open_descriptors(os.getpid())
    for _ in range(3):
        await (await node.connect()).close()
    assert open_descriptors(os.getpid()) == before


async def test_messenger_that_does_not_answer_counts_as_gone(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node("p0")
    client = await node.connect()
    reservation = await client.reserve(prompt_keys(2), 0)
    monkeypatch.setattr(calls_module, "_ANSWER_TIMEOUT_S", 0.2)
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    with pytest.raises(PoolError, match="p0 did not answer within"):
        await client.reserve(prompt_keys(2), 0)
    assert client.closed.is_set()
    await client.release(reservation.reservation_id)  # its messenger, or its end, has done that
    await client.close()
    node.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    again = await node.connect()
    await until(again, unused)
    await again.close()
