"""Two messenger processes that move KVCache by RDMA. They start slowly in an emulated machine: once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from messenger.transport.transports import Transport
from mooncake.errors import TransferError
from tests.kvstore.nodes import (
    SEGMENT_PAGE_BYTES,
    Node,
    assert_holds,
    prompt_keys,
    until,
    unused,
    write_layers,
)
from tests.kvstore.test_transfers import ALL_LAYERS, BLOCK_BYTES, Pair

START_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    folder: Path = tmp_path_factory.mktemp("rdma")
    with contextlib.ExitStack() as stack:
        started = [
            Node(folder, name, 16 * SEGMENT_PAGE_BYTES + 3 * 4096, "rdma") for name in ("prefill", "decode")
        ]
        for node in started:
            stack.callback(node.close)
            node.start()
        yield started[0], started[1]


@contextlib.asynccontextmanager
async def connected(nodes: tuple[Node, Node]) -> AsyncIterator[Pair]:
    async with asyncio.timeout(START_TIMEOUT_S):
        pair = Pair(*nodes, await nodes[0].connect(), await nodes[1].connect())
        yield pair
        await pair.prefill.close()
        await pair.decode.close()


async def test_layers_travel_by_rdma_as_they_are_committed(nodes: tuple[Node, Node]) -> None:
    async with connected(nodes) as pair:
        keys = prompt_keys(3)
        source, to, _ = await pair.begin(keys, 1)
        for layer in ALL_LAYERS:
            await write_layers(pair.prefill, source, [*keys, None], range(layer, layer + 1))
        await pair.prefill.wait_sent(source.reservation_id)
        await pair.decode.wait_arrived(to.reservation_id)
        assert_holds(pair.decode, to, [*keys, None])
        sent = (await pair.prefill.stats(check_integrity=True)).sent_bytes
        assert sent == {Transport.SHM: 0, Transport.TCP: 0, Transport.RDMA: 4 * BLOCK_BYTES}
        for client, reservation in ((pair.prefill, source), (pair.decode, to)):
            await client.release(reservation.reservation_id)
            await until(client, unused)


async def test_reservation_that_is_released_in_mid_transfer_leaves_no_page_in_use(
    nodes: tuple[Node, Node],
) -> None:
    async with connected(nodes) as pair:
        keys = prompt_keys(4, first_token=10_000)
        source, to, _ = await pair.begin(keys)
        await write_layers(pair.prefill, source, keys, range(2))
        await until(pair.decode, lambda stats: stats.received_bytes[Transport.RDMA] > 4 * BLOCK_BYTES)
        await pair.decode.release(to.reservation_id)
        with pytest.raises(TransferError, match="released"):
            await pair.prefill.wait_sent(source.reservation_id)
        await pair.prefill.release(source.reservation_id)
        for client in (pair.prefill, pair.decode):
            await until(client, unused)
        await pair.assert_works()


async def test_killed_receiver_fails_the_send_within_two_seconds(nodes: tuple[Node, Node]) -> None:
    async with connected(nodes) as pair:
        keys = prompt_keys(4, first_token=20_000)
        source, _, _ = await pair.begin(keys)
        await write_layers(pair.prefill, source, keys, range(2))
        await until(pair.decode, lambda stats: stats.num_reserved == 4)
        pair.decode_node.kill()
        killed_s = time.monotonic()
        with pytest.raises(TransferError):
            await pair.prefill.wait_sent(source.reservation_id)
        assert time.monotonic() - killed_s < 2.0
        await pair.prefill.release(source.reservation_id)
        await until(pair.prefill, unused)
        pair.decode_node.start()
        pair.decode = await pair.decode_node.connect()
        await pair.assert_works()
