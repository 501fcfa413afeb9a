"""The way to a peer, and what it answers."""

import asyncio
import socket

import pytest

from messenger.doctor import reachability
from messenger.doctor.findings import Level
from messenger.doctor.reachability import PeerAddress
from mooncake.errors import ConfigError, TransferError
from tests.messenger.doctor.machines import GIB, FakeMachine, only


class FakeProbe:
    """A peer that moves `rate` bytes per second, or raises it."""

    def __init__(self, rate: float | Exception = 1e6, **nics: float | Exception) -> None:
        self.rate = rate
        self.rates_by_nic = nics
        self.asked: list[int] = []

    async def handshake(self) -> str:
        return "decode-0, incarnation 3"

    async def bandwidth(self, num_bytes: int) -> float:
        self.asked.append(num_bytes)
        if isinstance(self.rate, Exception):
            raise self.rate
        return self.rate

    @property
    def nics(self) -> list[str]:
        return list(self.rates_by_nic)

    async def rdma_bandwidth(self, nic: str, num_bytes: int) -> float:
        rate = self.rates_by_nic[nic]
        if isinstance(rate, Exception):
            raise rate
        return rate


def opening(probe: reachability.PeerProbe) -> reachability.OpenProbe:
    async def open_probe() -> reachability.PeerProbe:
        return probe

    return open_probe


FAR = PeerAddress("10.0.0.2", 7900)


def test_bandwidth_is_measured_for_about_half_a_second(machine: FakeMachine) -> None:
    probe = FakeProbe(2.0 * GIB)
    handshake, bandwidth = reachability.data_plane(opening(probe))
    assert handshake.found == "decode-0, incarnation 3 answers"
    assert (bandwidth.level, bandwidth.found) == (Level.OK, "tcp 2 GiB/s")
    assert probe.asked == [reachability.FIRST_BYTES, GIB]


def test_bandwidth_of_every_rdma_device_is_told_or_why_there_is_none(machine: FakeMachine) -> None:
    probe = FakeProbe(2.0 * GIB, mlx5_0=20.0 * GIB, mlx5_1=TransferError("no answer from the peer"))
    *_, first, second = reachability.data_plane(opening(probe))
    assert (first.level, first.found) == (Level.OK, "from mlx5_0 20 GiB/s")
    assert (second.level, second.found) == (
        Level.WARN,
        "rdma from mlx5_1 carries nothing: no answer from the peer",
    )


def test_a_very_fast_path_is_not_asked_for_ever_more(machine: FakeMachine) -> None:
    probe = FakeProbe(50.0 * GIB)
    reachability.data_plane(opening(probe))
    assert probe.asked == [reachability.FIRST_BYTES, reachability.MOST_BYTES]


def test_a_slow_path_is_not_asked_for_more(machine: FakeMachine) -> None:
    probe = FakeProbe(1e6)
    reachability.data_plane(opening(probe))
    assert probe.asked == [reachability.FIRST_BYTES]


def test_a_path_that_carries_nothing_is_a_failure(machine: FakeMachine) -> None:
    probe = FakeProbe(TransferError("the peer closed the connection"))
    _, failed = reachability.data_plane(opening(probe))
    assert (failed.level, failed.found) == (
        Level.FAIL,
        "tcp carries nothing: the peer closed the connection",
    )


def test_a_peer_that_never_answers_is_given_up(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeProbe):
        async def handshake(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(reachability, "HANDSHAKE_TIMEOUT_S", 0.05)
    finding = only(reachability.data_plane(opening(Silent())))
    assert (finding.level, finding.title) == (Level.FAIL, "handshake")
    assert finding.found.endswith("no answer in time")


def test_a_refusal_is_told_in_the_words_of_the_peer(machine: FakeMachine) -> None:
    async def open_probe() -> reachability.PeerProbe:
        raise TransferError("the peer has another cluster key")

    finding = only(reachability.data_plane(open_probe))
    assert finding.found.endswith("the peer has another cluster key")


def test_without_its_key_no_handshake_is_tried(machine: FakeMachine) -> None:
    async def open_probe() -> reachability.PeerProbe:
        raise ConfigError("there is no cluster key at /etc/key")

    finding = only(reachability.data_plane(open_probe))
    assert (finding.level, finding.found) == (
        Level.WARN,
        "not tried: there is no cluster key at /etc/key",
    )


def test_nothing_is_measured_where_nobody_listens(machine: FakeMachine) -> None:
    probe = FakeProbe()
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        finding = only(reachability.way(machine, PeerAddress(*bound.getsockname()), opening(probe)))
    assert (finding.title, finding.level) == ("peer", Level.FAIL)
    assert probe.asked == []


def test_an_open_way_is_measured(machine: FakeMachine, listener: PeerAddress) -> None:
    findings = list(reachability.way(machine, listener, opening(FakeProbe())))
    assert [finding.title for finding in findings] == ["peer", "handshake", "bandwidth"]


def test_the_time_to_connect_is_told(machine: FakeMachine, listener: PeerAddress) -> None:
    connected = only(reachability.connection(machine, listener))
    assert connected.level is Level.OK
    assert f"{listener} accepts connections, in " in connected.found


def test_the_sizes_of_packets_to_another_host_are_told(machine: FakeMachine, listener: PeerAddress) -> None:
    elsewhere = FakeMachine(machine.root, addresses=())
    _, packets = reachability.connection(elsewhere, listener)
    assert packets.level is Level.OK
    assert packets.found.startswith("packets of 6553")


def test_a_closed_port_is_no_firewall(machine: FakeMachine) -> None:
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        finding = only(reachability.connection(machine, PeerAddress(*bound.getsockname())))
    assert finding.level is Level.FAIL
    assert finding.found.startswith("the host answers, but nobody listens at")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (TimeoutError("timed out"), "no answer from 10.0.0.2:7900 within 1.5 s"),
        (OSError(113, "No route to host"), "no way to 10.0.0.2:7900: No route to host"),
        (socket.gaierror(-2, "Name or service not known"), "10.0.0.2:7900 has no address"),
    ],
)
def test_each_way_of_not_reaching_a_peer_has_its_words(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, error: OSError, found: str
) -> None:
    def fail(*_: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    finding = only(reachability.connection(machine, FAR))
    assert (finding.level, finding.found) == (Level.FAIL, found)


PING = "ping -c 1 -W 1 -M do -s"


@pytest.mark.parametrize(
    ("mtu", "segment_bytes", "outputs", "level", "found"),
    [
        (1500, 1448, {}, Level.OK, "packets of 1500 bytes"),
        (9000, 1448, {}, Level.WARN, "9000 bytes on this side, about 1500 on the other"),
        (
            9000,
            8948,
            {f"{PING} {size} 10.0.0.2": "ok" for size in (56, 8972)},
            Level.OK,
            "packets of 9000 bytes arrive",
        ),
        (9000, 8948, {f"{PING} 56 10.0.0.2": "ok"}, Level.WARN, "packets of 9000 bytes do not arrive, small"),
        (9000, 8948, {}, Level.OK, "whether they arrive is not known"),
    ],
)
def test_large_packets_that_are_lost_are_told(
    machine: FakeMachine,
    mtu: int,
    segment_bytes: int,
    outputs: dict[str, str],
    level: Level,
    found: str,
) -> None:
    machine = FakeMachine(machine.root, outputs=outputs)
    packets = reachability._packets(machine, socket.AF_INET, "10.0.0.2", mtu, segment_bytes)
    finding = only(packets)
    assert finding.level is level
    assert found in finding.found


def test_a_name_that_does_not_resolve_fails(machine: FakeMachine) -> None:
    assert only(reachability.name(machine, PeerAddress("no-such-name", 1))).level is Level.FAIL
    named = FakeMachine(machine.root, hosts={"node-b": ["10.0.0.2"]})
    assert only(reachability.name(named, PeerAddress("node-b", 1))).found == "node-b is 10.0.0.2"
    assert list(reachability.name(machine, FAR)) == []
    assert list(reachability.name(machine, PeerAddress("2001:db8::1", 1))) == []
