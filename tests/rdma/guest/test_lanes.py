"""Two messengers in one event loop, joined by real queue pairs from rxe0 to rxe1."""

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from messenger.doctor.probe import ProbeClient
from messenger.rdma import cards
from messenger.rdma.adapter import Adapter
from messenger.rdma.cards import Cards
from messenger.rdma.devices import find_devices
from messenger.rdma.endpoint import Endpoint
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.requests import ProbeRequest, Urgency
from messenger.transport.transports import Transport
from messenger.wire.checksums import prepare
from mooncake.errors import TransferError
from tests.deadline import DEADLINE_S
from tests.leaks import unseen_exceptions as unseen_exceptions
from tests.messenger.fabric import KEY, LARGE, Fabric, fabric, until
from tests.rdma.guest.test_resources import verbs_objects

NUM_ROUNDS = 3
NEIGHBOUR, NOBODY = "02:00:00:00:77:02", "02:00:00:00:77:99"


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    """That there is no compiler is logged once, with an error that would keep what its test has mapped."""
    prepare()


@contextmanager
def cards_of(name: str) -> Iterator[Cards]:
    adapter = Adapter(find_devices([name]).devices[0])
    try:
        yield Cards([adapter])
    finally:
        adapter.close()


@asynccontextmanager
async def joined(folder: Path, transport: str, **changed: object) -> AsyncIterator[Fabric]:
    changed = {"transport": transport, "connect_timeout_s": 10.0, **changed}
    with cards_of("rxe0") as ours, cards_of("rxe1") as theirs:
        async with fabric(folder, LARGE, cards=(ours, theirs), **changed) as node:
            yield node


def send_packets_to(mac: str) -> None:
    command = ["ip", "neigh", "replace", "10.77.0.2", "lladdr", mac, "dev", "rdma0", "nud", "permanent"]
    subprocess.run(command, check=True)


def rdma_lanes(peer: OutgoingSession) -> int:
    return sum(lane.path.transport is Transport.RDMA for lane in peer.lanes)


async def everything_said_has_been_heard(peer: OutgoingSession) -> None:
    heard = asyncio.Event()
    await peer.submit(ProbeRequest(memoryview(b""), Urgency.LATENCY, lambda _failure: heard.set()))
    await heard.wait()


@pytest.mark.parametrize("aborted_by", ["sender", "receiver"])
async def test_transfer_that_is_aborted_in_mid_write_leaves_the_queue_pair_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aborted_by: str
) -> None:
    """What is lost on the way is sent again by the devices, after the news of the end has come by TCP."""
    monkeypatch.setattr(cards, "Endpoint", functools.partial(Endpoint, dead_peer_s=8.0))
    async with joined(tmp_path, "rdma") as node:
        peer = await node.peers.peer(node.address)
        lanes = list(peer.lanes)
        for n in range(NUM_ROUNDS):
            begun, aborted_id, kept_id = 4 * n, 2 * n, 2 * n + 1
            node.pages.grant(aborted_id, [0, 1])
            node.pages.grant(kept_id, [begun + 2, begun + 3])
            send_packets_to(NOBODY)
            try:
                aborted = asyncio.create_task(node.write(aborted_id, [0, 1]))
                kept = asyncio.create_task(node.write(kept_id, [begun + 2, begun + 3]))
                await until(lambda: peer.lanes[0].num_outstanding == 4 and node.pages.num_exposed == 2)
                await everything_said_has_been_heard(peer)
                if aborted_by == "sender":
                    aborted.cancel()
                else:
                    node.pages.revoke(aborted_id, "not wanted any more")
                with contextlib.suppress(asyncio.CancelledError, TransferError):
                    await aborted
                await everything_said_has_been_heard(peer)
            finally:
                send_packets_to(NEIGHBOUR)
            await kept
            node.assert_written([begun + 2, begun + 3])
            await until(lambda: node.pages.num_exposed == 0, DEADLINE_S)
            assert list(peer.lanes) == lanes
        assert node.received.received_bytes[Transport.TCP] == 0


async def test_probe_measures_what_the_queue_pair_carries(tmp_path: Path) -> None:
    async with joined(tmp_path, "auto") as node:
        probe = ProbeClient(*node.endpoint, KEY, None, node.cards[0])
        assert await probe.rdma_bandwidth("rxe0/1", 16 << 20) > 1 << 20


async def test_path_that_is_cut_is_replaced_by_tcp_and_used_again_when_it_works(tmp_path: Path) -> None:
    async with joined(tmp_path, "auto") as node:
        peer = await node.peers.peer(node.address_with(host_id="elsewhere"))
        block_bytes, sent = node.layout.block_bytes, node.sent.sent_bytes
        try:
            await until(lambda: rdma_lanes(peer) and len(peer.lanes) == 2, DEADLINE_S)
            node.pages.grant(1, range(4))
            await node.write(1, range(4), peer=peer)
            assert sent[Transport.RDMA] == 4 * block_bytes
            send_packets_to(NOBODY)
            node.pages.grant(2, range(4, 8))
            await node.write(2, range(4, 8), peer=peer)
            assert (sent[Transport.RDMA], sent[Transport.TCP]) == (4 * block_bytes, 4 * block_bytes)
            assert not rdma_lanes(peer)
        finally:
            send_packets_to(NEIGHBOUR)
        await until(lambda: rdma_lanes(peer), DEADLINE_S)
        node.pages.grant(3, range(8, 12))
        await node.write(3, range(8, 12), peer=peer)
        assert (sent[Transport.RDMA], sent[Transport.TCP]) == (8 * block_bytes, 4 * block_bytes)
        node.assert_written(range(12))


async def test_session_that_makes_room_for_another_gives_its_queue_pairs_back(tmp_path: Path) -> None:
    async with joined(tmp_path, "rdma", max_sessions=1) as node:
        before, num_pairs = verbs_objects()["qp"], []
        for number, name in enumerate(("first", "second", "first")):
            address = node.address_with(event_endpoints=(name, ""))
            peer = await node.peers.peer(address)
            # The one before has ended at both sides.
            await until(lambda: node.num_served == 1, DEADLINE_S)
            assert node.peers.all == [peer]
            num_pairs.append(verbs_objects()["qp"] - before)
            node.pages.grant(number, [number])
            await node.write(number, [number], peer=peer)
            node.assert_written([number])
        assert num_pairs == [2, 2, 2]  # one at each side
        assert node.received.received_bytes[Transport.RDMA] == 3 * LARGE.block_bytes
