"""Lanes over RDMA, with devices that the test makes fail."""

import asyncio
import itertools
import logging
from pathlib import Path

import pytest

from messenger.doctor.probe import ProbeClient
from messenger.paths import health
from messenger.rdma import cards
from messenger.rdma.cards import open_cards
from messenger.rdma.devices import FoundDevices
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.requests import WriteOutcome
from messenger.transport.transports import Remedy, Transport
from mooncake.config.sections import MessengerConfig
from mooncake.errors import ConfigError, TransferError
from tests.deadline import DEADLINE_S
from tests.messenger import fake_rdma
from tests.messenger.fabric import KEY, Fabric, fabric, settings, until
from tests.messenger.fake_rdma import FakeNetwork, device


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.05)
    return fake_rdma.install(monkeypatch)


async def session(node: Fabric, num_rdma: int = 1) -> OutgoingSession:
    """With a messenger of another host, when it has so many lanes of RDMA beside those of TCP."""
    peer = await node.peers.peer(node.address_with(host_id="elsewhere"))
    await until(
        lambda: transports(peer).count(Transport.RDMA) == num_rdma and Transport.TCP in transports(peer)
    )
    return peer


def transports(peer: OutgoingSession) -> list[Transport]:
    return [lane.path.transport for lane in peer.lanes]


def sent(node: Fabric) -> dict[Transport, int]:
    blocks = {transport: n // node.layout.block_bytes for transport, n in node.sent.sent_bytes.items()}
    return {transport: n for transport, n in blocks.items() if n}


async def test_bytes_go_by_rdma_while_tcp_stands_by(tmp_path: Path, network: FakeNetwork) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="auto", cards=both) as node:
        node.pages.grant(1, range(8))
        await node.write(1, range(8), peer=await session(node))
        node.assert_written(range(8))
        assert sent(node) == {Transport.RDMA: 8}


@pytest.mark.parametrize("aborted_by", ["sender", "receiver"])
async def test_an_aborted_transfer_leaves_the_queue_pair_to_the_others(
    tmp_path: Path, network: FakeNetwork, aborted_by: str
) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="rdma", cards=both) as node:
        peer = await node.peers.peer(node.address)
        lanes = list(peer.lanes)
        node.pages.grant(1, [0, 1])
        node.pages.grant(2, [2, 3])
        network.may_land = False
        aborted, kept = (asyncio.create_task(node.write(n, [2 * n - 2, 2 * n - 1])) for n in (1, 2))
        await until(lambda: network.num_writing == 4)
        if aborted_by == "sender":
            aborted.cancel()
        else:
            node.pages.revoke(1, "not wanted any more")
        done, _ = await asyncio.wait([aborted])
        assert {task.cancelled() or isinstance(task.exception(), TransferError) for task in done} == {True}
        assert node.pages.num_exposed == 2  # what is on its way may still land
        network.may_land = True
        await kept
        node.assert_written([2, 3])
        await until(lambda: node.pages.num_exposed == 0)
        assert list(peer.lanes) == lanes
        await node.assert_works()


async def test_pages_of_a_complete_grant_are_closed_to_all_of_its_writers(
    tmp_path: Path, network: FakeNetwork
) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="rdma", cards=both) as node:
        first, last = [
            await node.peers_with(KEY, instance=name).peer(node.address) for name in ("rank 0", "rank 1")
        ]
        node.pages.grant(1, [0, 1])
        with (
            first.transfer(1, "first", lambda: None) as one,
            last.transfer(1, "last", lambda: None) as other,
        ):
            outcomes: list[WriteOutcome] = []
            for page, transfer in enumerate((one, other)):
                await transfer.write([node.entry(page)], node.layout.block_bytes, outcomes.append)
                await until(lambda n=page: len(outcomes) == n + 1)  # type: ignore[misc]
                assert node.pages.num_exposed == (1 if page == 0 else 0)
        assert outcomes == [WriteOutcome.PLACED] * 2
        node.assert_written([0, 1])


async def test_pages_are_closed_in_time_to_a_sender_that_does_not_stop(
    tmp_path: Path, network: FakeNetwork
) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="rdma", cards=both, ack_timeout_s=0.3) as node:
        node.config = settings(transport="rdma", ack_timeout_s=60.0)
        node.peers = node.peers_with(KEY)
        peer = await node.peers.peer(node.address)
        node.pages.grant(1, [0])
        network.may_land = False
        writing = asyncio.create_task(node.write(1, [0], peer=peer))
        await until(lambda: network.num_writing == 1)
        node.pages.revoke(1, "not wanted any more")
        with pytest.raises(TransferError, match="not wanted any more"):
            await writing
        assert node.pages.num_exposed == 1
        await until(lambda: node.pages.num_exposed == 0)
        network.may_land = True
        await until(lambda: peer.closed_reason is not None)


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_write_fails_with_its_connection_in_whichever_turn_it_begins(
    tmp_path: Path, network: FakeNetwork, num_turns: int
) -> None:
    """A lane may be closed between its taking of a request and the first turn of that write."""
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="rdma", cards=both, ack_timeout_s=DEADLINE_S) as node:
        peer = await node.peers.peer(node.address)
        node.pages.grant(1, [0])
        peer.lanes[0].give_up("a loss of the test")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S / 4):
            with pytest.raises(TransferError, match="a loss of the test"):
                await node.write(1, [0], peer=peer)


async def test_a_path_that_breaks_under_writes_is_left_alone_and_used_again(
    tmp_path: Path, network: FakeNetwork
) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="auto", cards=both, streams=2) as node:
        peer = await session(node, num_rdma=2)
        network.fault = lambda _endpoint: Remedy.OTHER_PATH
        network.connect_fault = lambda _endpoint: Remedy.OTHER_PATH
        node.pages.grant(1, range(4))
        await node.write(1, range(4), peer=peer)
        node.assert_written(range(4))
        assert sent(node) == {Transport.TCP: 4}
        assert set(transports(peer)) == {Transport.TCP}
        network.fault = network.connect_fault = lambda _endpoint: None
        await session(node, num_rdma=2)
        node.pages.grant(2, range(4, 8))
        await node.write(2, range(4, 8), peer=peer)
        assert sent(node) == {Transport.TCP: 4, Transport.RDMA: 4}


async def test_a_device_in_trouble_takes_all_connections_of_its_path_out_of_use(
    tmp_path: Path, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE_S", 60.0)
    both = network.cards(device("a"), device("c")), network.cards(device("b"))
    async with fabric(tmp_path, transport="auto", cards=both, streams=2) as node:
        peer = await session(node, num_rdma=4)
        faults = [Remedy.OTHER_PATH]
        network.fault = lambda _endpoint: faults.pop() if faults else None
        node.pages.grant(1, [0])
        await node.write(1, [0], peer=peer)
        node.assert_written([0])
        await until(lambda: len(peer.lanes) == 4)
        assert len({lane.path for lane in peer.lanes}) == 2
        assert sent(node) == {Transport.RDMA: 1}


@pytest.mark.parametrize("remedy", list(Remedy))
async def test_no_request_fails_of_a_path_that_can_be_tried_but_not_used(
    tmp_path: Path, network: FakeNetwork, remedy: Remedy
) -> None:
    network.fault = lambda _endpoint: remedy
    both = network.cards(*(device(name) for name in "abcdef")), network.cards(device("g"))
    async with fabric(tmp_path, transport="auto", cards=both) as node:
        peer = await session(node, num_rdma=6)
        for n in range(8):
            node.pages.grant(n, [n])
            await node.write(n, [n], peer=peer)
        node.assert_written(range(8))
        assert sent(node) == {Transport.TCP: 8}


async def test_a_refused_request_is_all_that_leaves_the_path(tmp_path: Path, network: FakeNetwork) -> None:
    faults = [Remedy.GIVE_UP]
    network.fault = lambda _endpoint: faults.pop() if faults else None
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="rdma", cards=both, streams=2) as node:
        peer = await node.peers.peer(node.address)
        await until(lambda: len(peer.lanes) == 2)
        node.pages.grant(1, [0])
        with pytest.raises(TransferError, match="a fault of the test"):
            await node.write(1, [0], peer=peer)
        node.pages.grant(2, [1])
        await node.write(2, [1], peer=peer)
        node.assert_written([1])


async def test_a_path_that_carries_nothing_is_tried_less_and_less_often(
    tmp_path: Path, network: FakeNetwork
) -> None:
    network.connect_fault = lambda _endpoint: Remedy.OTHER_PATH
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, transport="auto", cards=both) as node:
        loop = asyncio.get_running_loop()
        peer = await node.peers.peer(node.address_with(host_id="elsewhere"))
        tries_s = []
        for num_tries in range(1, 5):
            await until(lambda n=num_tries: network.num_made >= 2 * n)  # type: ignore[misc]
            tries_s.append(loop.time())
        pauses_s = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
        assert pauses_s[0] < pauses_s[1] < pauses_s[2]
        assert set(transports(peer)) == {Transport.TCP}


async def test_a_probe_measures_without_being_anybody(tmp_path: Path, network: FakeNetwork) -> None:
    both = network.cards(device("a")), network.cards(device("b"))
    async with fabric(tmp_path, cards=both) as node:
        probe = ProbeClient(*node.endpoint, KEY, None, node.cards[0])
        assert probe.nics == ["a/1"]
        assert await probe.handshake() == "receiver"
        assert await probe.bandwidth(1 << 20) > 0
        assert await probe.rdma_bandwidth("a/1", 3 << 20) > 0


async def test_a_probe_hears_that_the_other_side_has_no_rdma(tmp_path: Path, network: FakeNetwork) -> None:
    async with fabric(tmp_path, cards=(network.cards(device("a")), network.cards())) as node:
        probe = ProbeClient(*node.endpoint, KEY, None, node.cards[0])
        with pytest.raises(TransferError, match="no RDMA device in use"):
            await probe.rdma_bandwidth("a/1", 1 << 20)


async def test_the_answering_card_is_of_the_senders_network_or_else_the_next_one(
    network: FakeNetwork,
) -> None:
    rails = [device(name, f"::ffff:10.0.{n}.1", f"::ffff:10.0.{n}.0/120") for n, name in enumerate("abc")]
    cards = network.cards(*rails)
    await cards.register(memoryview(bytearray(4096)))
    probe = network.cards(device("x"))
    await probe.register(memoryview(bytearray(4096)))
    info = (await probe.card("x/1")).endpoint("a test").local_info()

    async def names(gid: str) -> list[str]:
        fields = {name: getattr(info, name) for name in info.__struct_fields__}
        remote = type(info)(**{**fields, "gid": gid})
        return [(await cards.answering(remote)).adapter.device.name for _ in range(3)]

    assert await names("::ffff:10.0.1.9") == ["b", "b", "b"]
    assert sorted(await names("::ffff:10.9.9.9")) == ["a", "b", "c"]
    assert sorted(await names("no address")) == ["a", "b", "c"]


async def test_the_ports_of_a_device_are_cards_of_their_own(network: FakeNetwork) -> None:
    cards = network.cards(device("a", port=1), device("a", port=2))
    assert cards.names == ["a/1", "a/2"]
    await cards.register(memoryview(bytearray(4096)))
    assert (await cards.card("a/2")).adapter.device.port == 2


def test_a_machine_without_devices_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    none = FoundDevices([], ["this machine has no RDMA device"])
    monkeypatch.setattr(cards, "find_devices", lambda *_: none)
    open_cards(MessengerConfig(topology="{}"))
    assert caplog.messages == []
    with pytest.raises(ConfigError, match=r"there is no device to use: this machine has no RDMA device$"):
        open_cards(MessengerConfig(topology="{}", transport="rdma"))
