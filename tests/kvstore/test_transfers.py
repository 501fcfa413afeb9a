"""Two messenger processes: a prefill node streams blocks to a decode node."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from messenger.transport.transports import Transport
from mooncake.errors import TransferError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, PoolStats, Tier
from tests.kvstore.nodes import (
    FINGERPRINT,
    LAYOUT,
    Node,
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
BLOCK_BYTES = LAYOUT.block_bytes
both_transports = pytest.mark.parametrize("transport", [Transport.SHM, Transport.TCP])


@dataclass
class Pair:
    """A prefill and a decode node with their workers."""

    prefill_node: Node
    decode_node: Node
    prefill: WorkerClient
    decode: WorkerClient

    async def begin(
        self, keys: list[BlockKey], num_private: int = 0
    ) -> tuple[Reservation, Reservation, Grant]:
        """Both sides reserve the same prompt, and the prefill side starts to send."""
        to = await self.decode.reserve(keys, num_private)
        grant = await self.decode.grant(to.reservation_id)
        source = await self.prefill.reserve(keys, num_private)
        await self.prefill.send(source.reservation_id, grant, "request 1")
        return source, to, grant

    async def assert_works(self, first_token: int = 90_000) -> None:
        """A whole transfer succeeds, whatever happened before."""
        keys = prompt_keys(2, first_token)
        source, to, _ = await self.begin(keys, 1)
        await write_layers(self.prefill, source, [*keys, None], ALL_LAYERS)
        await self.prefill.wait_sent(source.reservation_id)
        await self.decode.wait_arrived(to.reservation_id)
        assert_holds(self.decode, to, [*keys, None])
        await self.prefill.release(source.reservation_id)
        await self.decode.release(to.reservation_id)


@contextlib.asynccontextmanager
async def pair(start_node: StartNode, transport: Transport) -> AsyncIterator[Pair]:
    prefill, decode = (start_node(name, transport=transport.value) for name in ("prefill", "decode"))
    nodes = Pair(prefill, decode, await prefill.connect(), await decode.connect())
    yield nodes
    await nodes.prefill.close()
    await nodes.decode.close()


@both_transports
async def test_layers_travel_as_they_are_committed(start_node: StartNode, transport: Transport) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(3)
        source, to, _ = await nodes.begin(keys, 1)
        for layer in ALL_LAYERS:
            await write_layers(nodes.prefill, source, [*keys, None], range(layer, layer + 1))
            num_bytes = 4 * (layer + 1) * LAYOUT.layer_bytes
            await until(nodes.decode, lambda s, n=num_bytes: s.received_bytes[transport] == n)  # type: ignore[misc]
        await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.decode.wait_arrived(to.reservation_id)
        assert_holds(nodes.decode, to, [*keys, None])
        await nodes.decode.release(to.reservation_id)
        again = await nodes.decode.reserve(keys, 1)
        assert [block.sealed for block in again.blocks] == [True, True, True, False]


@both_transports
async def test_only_lacking_blocks_travel_and_sealed_ones_at_once(
    start_node: StartNode, transport: Transport
) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(4)
        for client, known in ((nodes.decode, keys[:2]), (nodes.prefill, keys[:3])):
            reservation = await client.reserve(known, 0)
            await write_layers(client, reservation, known, ALL_LAYERS)
            await client.release(reservation.reservation_id)
        source, to, grant = await nodes.begin(keys)
        assert [page.block_index for page in grant.pages] == [2, 3]
        await until(nodes.decode, lambda stats: stats.received_bytes[transport] == BLOCK_BYTES)
        await write_layers(nodes.prefill, source, keys, ALL_LAYERS)
        await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.decode.wait_arrived(to.reservation_id)
        assert_holds(nodes.decode, to, keys)
        stats = await nodes.prefill.stats(check_integrity=True)
        assert stats.sent_bytes[transport] == 2 * BLOCK_BYTES
        (path,) = stats.peers.values()
        assert (path.sent_bytes, path.received_bytes) == ({transport: 2 * BLOCK_BYTES}, {})
        assert set(path.busy_s) == {transport}
        assert 0 < path.busy_s[transport] < 60
        # Nothing is lacking now: an empty grant is complete from the start.
        source, to, grant = await nodes.begin(keys)
        assert grant.pages == []
        await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.decode.wait_arrived(to.reservation_id)


STAGES = [LAYOUT.of_layers(range(1)), LAYOUT.of_layers(range(1, LAYOUT.num_layers))]
RANKS = [LAYOUT.of_heads(range(1)), LAYOUT.of_heads(range(1, 2))]
both_groups = pytest.mark.parametrize("shards", [STAGES, RANKS], ids=["stages", "ranks"])


@both_transports
@both_groups
async def test_members_of_a_group_fill_one_grant_each_with_its_own_shard(
    start_node: StartNode, transport: Transport, shards: list[KVLayout]
) -> None:
    stages = []
    for number, shard in enumerate(shards):
        node = start_node(f"stage-{number}", transport=transport.value)
        stages.append(await node.connect(layout=shard))
    decode = await start_node("decode", transport=transport.value).connect()
    keys = prompt_keys(3)
    for wanted, sent in ((keys[:2], 2), (keys, 1)):  # the second time only what is lacking
        to = await decode.reserve(wanted, 1)
        grant = await decode.grant(to.reservation_id)
        assert len(grant.pages) == sent + 1
        sources = []
        for stage in reversed(stages):
            source = await stage.reserve(wanted, 1)
            await stage.send(source.reservation_id, grant, "request 1")
            own_layers = range(stage.segment.layout.num_layers)
            await write_layers(stage, source, [*wanted, None], own_layers)
            await stage.wait_sent(source.reservation_id)
            sources.append(source)
        await decode.wait_arrived(to.reservation_id)
        assert_holds(decode, to, [*wanted, None])
        await decode.release(to.reservation_id)
        for stage, source in zip(reversed(stages), sources, strict=True):
            await stage.release(source.reservation_id)
    for client in (*stages, decode):
        stats = await client.stats(check_integrity=True)
        assert (stats.num_reserved, stats.num_quarantined) == (0, 0)
        await client.close()


@both_transports
@both_groups
async def test_a_member_that_is_lost_fails_the_grant_that_others_write_to(
    start_node: StartNode, transport: Transport, shards: list[KVLayout]
) -> None:
    nodes = [start_node(name, transport=transport.value) for name in ("stage-0", "stage-1")]
    stages = [await node.connect(layout=shard) for node, shard in zip(nodes, shards, strict=True)]
    decode = await start_node("decode", transport=transport.value).connect()
    keys = prompt_keys(2)
    to = await decode.reserve(keys, 0)
    grant = await decode.grant(to.reservation_id)
    for stage in stages:
        source = await stage.reserve(keys, 0)
        await stage.send(source.reservation_id, grant, "request 1")
        await write_layers(stage, source, keys, range(1))
    num_bytes = sum(2 * shard.layer_bytes for shard in shards)
    await until(decode, lambda s: s.received_bytes[transport] == num_bytes)
    nodes[1].kill()
    with pytest.raises(TransferError, match="connection from stage-1 was lost"):
        await decode.wait_arrived(to.reservation_id)
    await decode.release(to.reservation_id)
    await until(decode, lambda s: s.num_reserved == 0 and s.num_quarantined == 0)
    for client in (*stages, decode):
        await client.close()


async def test_auto_prefers_shared_memory_on_one_host_and_falls_back_to_tcp(start_node: StartNode) -> None:
    nodes = [start_node(name) for name in ("prefill", "decode")]
    both = Pair(nodes[0], nodes[1], await nodes[0].connect(), await nodes[1].connect())
    await both.assert_works()
    assert (await both.prefill.stats(check_integrity=True)).sent_bytes == {
        Transport.SHM: 3 * BLOCK_BYTES,
        Transport.TCP: 0,
        Transport.RDMA: 0,
    }
    os.unlink(nodes[1].peer_socket_path)
    source = await both.decode.reserve(prompt_keys(1), 0)
    await write_layers(both.decode, source, prompt_keys(1), ALL_LAYERS)
    nodes[0].kill()
    nodes[0].start()
    await both.prefill.close()
    both.prefill = await nodes[0].connect()
    keys = prompt_keys(1, first_token=500)
    source, _, _ = await both.begin(keys)
    await write_layers(both.prefill, source, keys, ALL_LAYERS)
    await both.prefill.wait_sent(source.reservation_id)
    assert (await both.prefill.stats(check_integrity=True)).sent_bytes[Transport.TCP] == BLOCK_BYTES
    await both.prefill.close()
    await both.decode.close()


@both_transports
@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_release_in_mid_send_leaves_no_page_in_use(
    start_node: StartNode, transport: Transport, who: str
) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(8)
        source, to, _ = await nodes.begin(keys, 1)
        await write_layers(nodes.prefill, source, [*keys, None], range(2))
        await until(nodes.decode, lambda stats: stats.received_bytes[transport] > 0)
        sides = [(nodes.prefill, source), (nodes.decode, to)]
        if who == "decode":
            sides.reverse()
        (first, its_reservation), (second, other_reservation) = sides
        other_waits = asyncio.create_task(
            second.wait_sent(other_reservation.reservation_id)
            if second is nodes.prefill
            else second.wait_arrived(other_reservation.reservation_id)
        )
        await first.release(its_reservation.reservation_id)
        with pytest.raises(TransferError, match=r"released|gave up|revoked|unknown|ended"):
            await other_waits
        await second.release(other_reservation.reservation_id)
        for client in (first, second):
            await until(client, unused)
        await nodes.assert_works()


@both_transports
async def test_killed_receiver_fails_the_send_at_once_and_its_successor_is_reached(
    start_node: StartNode, transport: Transport
) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(4)
        source, _, grant = await nodes.begin(keys)
        await write_layers(nodes.prefill, source, keys, range(2))
        await until(nodes.prefill, lambda stats: stats.sent_bytes[transport] > 0)
        nodes.decode_node.kill()
        with pytest.raises(TransferError, match=r"connection to decode .*was lost"):
            await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.prefill.release(source.reservation_id)
        await until(nodes.prefill, unused)

        nodes.decode_node.start()
        await nodes.decode.close()
        nodes.decode = await nodes.decode_node.connect()
        stale = await nodes.prefill.reserve(keys, 0)
        await nodes.prefill.send(stale.reservation_id, grant, "of the earlier life")
        with pytest.raises(TransferError, match=r"expected messenger decode .incarnation 1|cannot reach"):
            await nodes.prefill.wait_sent(stale.reservation_id)
        await nodes.prefill.release(stale.reservation_id)
        await nodes.assert_works()


@both_transports
async def test_killed_sender_fails_the_arrival_at_once(start_node: StartNode, transport: Transport) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(4)
        source, to, _ = await nodes.begin(keys)
        await write_layers(nodes.prefill, source, keys, range(2))
        await until(nodes.decode, lambda stats: stats.received_bytes[transport] > 0)
        nodes.prefill_node.kill()
        with pytest.raises(TransferError, match="connection from prefill was lost"):
            await nodes.decode.wait_arrived(to.reservation_id)
        await nodes.decode.release(to.reservation_id)
        stats = await until(nodes.decode, unused)
        assert stats.num_sealed == 0
        nodes.prefill_node.start()
        await nodes.prefill.close()
        nodes.prefill = await nodes.prefill_node.connect()
        await nodes.assert_works()


@both_transports
async def test_dead_worker_ends_its_transfers(start_node: StartNode, transport: Transport) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(4)
        source, to, _ = await nodes.begin(keys)
        await write_layers(nodes.prefill, source, keys, range(2))
        await until(nodes.decode, lambda stats: stats.received_bytes[transport] > 0)
        await nodes.prefill.close()
        with pytest.raises(TransferError, match="prefill gave up"):
            await nodes.decode.wait_arrived(to.reservation_id)
        nodes.prefill = await nodes.prefill_node.connect()
        await until(nodes.prefill, unused)


@both_transports
async def test_stopped_receiver_is_given_up_after_the_ack_deadline(
    start_node: StartNode, transport: Transport
) -> None:
    async with pair(start_node, transport) as nodes:
        await nodes.assert_works()
        nodes.prefill_node.ack_timeout_s = 2.0
        nodes.prefill_node.kill()
        nodes.prefill_node.start()
        await nodes.prefill.close()
        nodes.prefill = await nodes.prefill_node.connect()
        keys = prompt_keys(4)
        source, to, _ = await nodes.begin(keys)
        await write_layers(nodes.prefill, source, keys, range(1))
        await until(nodes.prefill, lambda stats: stats.sent_bytes[transport] > 0)
        assert nodes.decode_node.process is not None
        nodes.decode_node.process.send_signal(signal.SIGSTOP)
        await write_layers(nodes.prefill, source, keys, range(1, 2))
        with pytest.raises(TransferError, match=r"no acknowledgement within 2 s"):
            await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.prefill.release(source.reservation_id)
        await until(nodes.prefill, unused)
        nodes.decode_node.process.send_signal(signal.SIGCONT)
        with pytest.raises(TransferError, match="connection from prefill was lost"):
            await nodes.decode.wait_arrived(to.reservation_id)
        await nodes.assert_works()


@both_transports
async def test_other_model_is_refused_by_name_and_at_once(
    start_node: StartNode, transport: Transport
) -> None:
    prefill_node, decode_node = (start_node(n, transport=transport.value) for n in ("prefill", "decode"))
    prefill, decode = await prefill_node.connect(), await decode_node.connect(fingerprint="b" * 32)
    to = await decode.reserve(prompt_keys(1), 0)
    grant = await decode.grant(to.reservation_id)
    source = await prefill.reserve(prompt_keys(1), 0)
    await prefill.send(source.reservation_id, grant, "request 1")
    expected = f"refused: model fingerprint differs: ours is {'b' * 32}, theirs is {FINGERPRINT}"
    with pytest.raises(TransferError, match=expected):
        await prefill.wait_sent(source.reservation_id)
    await prefill.close()
    await decode.close()


@both_transports
async def test_damaged_source_is_detected_and_never_sealed(
    start_node: StartNode, transport: Transport
) -> None:
    async with pair(start_node, transport) as nodes:
        keys = prompt_keys(2)
        stored = await nodes.prefill.reserve(keys, 0)
        await write_layers(nodes.prefill, stored, keys, ALL_LAYERS)
        await nodes.prefill.stats(check_integrity=True)
        nodes.prefill.segment.layer_view(stored.blocks[1].page, 3)[5] ^= 0xFF
        await nodes.prefill.release(stored.reservation_id)
        source, to, _ = await nodes.begin(keys)
        with pytest.raises(TransferError, match=r"checksum of page .* from prefill does not match"):
            await nodes.decode.wait_arrived(to.reservation_id)
        with pytest.raises(TransferError, match="decode refused a write: checksum"):
            await nodes.prefill.wait_sent(source.reservation_id)
        await nodes.decode.release(to.reservation_id)
        await nodes.prefill.release(source.reservation_id)
        stats = await until(nodes.decode, unused)
        assert (stats.num_sealed, stats.num_checksum_failures) == (0, 1)
        # The source drops its damaged block, so that the next prompt recomputes it.
        again = await nodes.prefill.reserve(keys, 0)
        assert [block.sealed for block in again.blocks] == [True, False]
        assert (await nodes.prefill.stats(check_integrity=True)).num_dropped == 1


@both_transports
async def test_many_transfers_leave_no_descriptor_and_no_page_behind(
    start_node: StartNode, transport: Transport
) -> None:
    async with pair(start_node, transport) as nodes:
        await nodes.assert_works()
        pids = [n.process.pid for n in (nodes.prefill_node, nodes.decode_node) if n.process]
        before = [open_descriptors(pid) for pid in pids]

        def are_as_few(_: PoolStats) -> bool:  # for a moment a messenger may have one more
            return all(open_descriptors(pid) <= few for pid, few in zip(pids, before, strict=True))

        for first in range(0, 20, 4):
            await asyncio.gather(*(nodes.assert_works(1000 * number) for number in range(first, first + 4)))
        for client in (nodes.prefill, nodes.decode):
            assert (await until(client, unused)).tiers[Tier.DRAM].num_evictions > 0
        await until(nodes.prefill, are_as_few)
