"""Checks of the path to another messenger: its name, the connection, packet sizes, its identity, bandwidth.

Owns: these checks. Does not know: the data plane's protocol, which a `PeerProbe` speaks.
"""

import asyncio
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from messenger.doctor.findings import Finding, Level, as_size
from messenger.doctor.machine import Machine
from mooncake.errors import ConfigError, MooncakeError

NUM_CONNECTS = 5
"""The number of connections whose median time is reported."""
CONNECT_TIMEOUT_S = 1.5
"""Time limit of one connection in seconds. A lost first packet is sent again after one second."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Time limit of a handshake in seconds, the default of `messenger.connect_timeout_s`."""
BANDWIDTH_TIMEOUT_S = 10.0
"""Time limit in seconds of both measurements of a path together."""
FIRST_BYTES = 8 << 20
"""Bytes of the first measurement, whose result sets the size of the second."""
MOST_BYTES = 1 << 30
"""The most bytes of a measurement."""
_MEASURED_S = 0.5
"""Seconds that a path's second measurement should take."""
_USUAL_MTU = 1500
_LARGEST_ETHERNET_MTU = 16 << 10
"""Bytes of the largest MTU for which the segment size reveals the other side's MTU.

With a larger MTU the TCP window limits segments.
"""
_IP_MTU, _IPV6_MTU = 14, 24  # socket options of Linux that Python does not name
_TCP_HEADER_BYTES = {socket.AF_INET: 20 + 20 + 12, socket.AF_INET6: 40 + 20 + 12}
"""Bytes of the IP header, the TCP header and the TCP time stamps together, by address family."""
_ICMP_HEADER_BYTES = {socket.AF_INET: 20 + 8, socket.AF_INET6: 40 + 8}


class PeerAddress(NamedTuple):
    """The address at which the other messenger listens for transfers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerProbe(Protocol):
    """The interface of a client of the data plane, connected to a peer.

    Its errors are MooncakeError and OSError.
    """

    async def handshake(self) -> str:
        """Return the name of the instance that answers."""

    async def bandwidth(self, num_bytes: int) -> float:
        """Return the bytes a second of one transfer of `num_bytes` over TCP."""

    @property
    def nics(self) -> Sequence[str]:
        """The names of this side's usable RDMA devices."""

    async def rdma_bandwidth(self, nic: str, num_bytes: int) -> float:
        """Return the bytes a second at which the device `nic` writes `num_bytes` by RDMA."""


OpenProbe = Callable[[], Awaitable[PeerProbe]]


def name(machine: Machine, peer: PeerAddress) -> Iterator[Finding]:
    """Yield findings about the resolution of the peer's name."""
    try:
        addresses = machine.resolve(peer.host)
    except OSError as error:
        found = f"{peer.host} does not resolve: {error.strerror}"
        yield Finding(Level.FAIL, "peer name", found, "correct the name, or enter it in DNS or /etc/hosts")
    else:
        if addresses != [peer.host]:
            yield Finding(Level.OK, "peer name", f"{peer.host} is {', '.join(addresses)}")


def way(machine: Machine, peer: PeerAddress, open_it: OpenProbe) -> Iterator[Finding]:
    """Yield findings about the connection to the peer and, if the connection is made, about its bandwidth."""
    is_open = True
    for finding in connection(machine, peer):
        is_open &= finding.level is not Level.FAIL
        yield finding
    if is_open:
        yield from data_plane(open_it)


def connection(machine: Machine, peer: PeerAddress) -> Iterator[Finding]:
    """Yield findings about the time to connect to the peer's port, and the largest packets on the path."""
    times_s = []
    try:
        for _ in range(NUM_CONNECTS):
            start_s = time.perf_counter()
            with socket.create_connection(peer, CONNECT_TIMEOUT_S) as connected:
                times_s.append(time.perf_counter() - start_s)
                family, address = connected.family, connected.getpeername()[0]
                mtu, segment_bytes = _sizes(connected)
    except OSError as error:
        yield _refused(peer, error)
        return
    found = f"{peer} accepts connections, in {statistics.median(times_s) * 1e3:.2f} ms"
    yield Finding(Level.OK, "peer", found)
    if not machine.has_address(address):
        yield from _packets(machine, family, address, mtu, segment_bytes)


def data_plane(open_it: OpenProbe) -> list[Finding]:
    """Return findings about the answering instance, and the bandwidth over TCP and over each RDMA device.

    The RDMA devices are this side's.
    """
    return asyncio.run(_probe(open_it))


def _refused(peer: PeerAddress, error: OSError) -> Finding:
    advice = (
        f"start the messenger there, with messenger.port {peer.port} and messenger.hosts that others reach"
    )
    match error:
        case socket.gaierror():
            return Finding(Level.FAIL, "peer", f"{peer} has no address", "see the line about its name")
        case ConnectionRefusedError():
            return Finding(Level.FAIL, "peer", f"the host answers, but nobody listens at {peer}", advice)
        case TimeoutError():
            found = f"no answer from {peer} within {CONNECT_TIMEOUT_S:g} s"
            return Finding(
                Level.FAIL,
                "peer",
                found,
                "the host is down, or a firewall drops packets: open this port in it",
            )
        case _:
            found = f"no way to {peer}: {error.strerror or error}"
            return Finding(
                Level.FAIL, "peer", found, "look at routes (ip route get) and firewalls on both sides"
            )


def _sizes(connected: socket.socket) -> tuple[int, int]:
    """Return the MTU of the route as this side knows it, and the payload bytes of a segment."""
    if connected.family == socket.AF_INET6:
        mtu = connected.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    else:
        mtu = connected.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    return mtu, connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


def _packets(
    machine: Machine, family: socket.AddressFamily, address: str, mtu: int, segment_bytes: int
) -> Iterator[Finding]:
    """Yield findings about the largest packets on the path.

    If large packets are lost, transfers hang while small messages pass.
    """
    title = "peer mtu"
    other_mtu = segment_bytes + _TCP_HEADER_BYTES[family]
    if _USUAL_MTU < mtu < _LARGEST_ETHERNET_MTU and other_mtu + _TCP_HEADER_BYTES[family] < mtu:
        found = f"{mtu} bytes on this side, about {other_mtu} on the other"
        yield Finding(Level.WARN, title, found, "set the same MTU on both hosts and the switches between")
        return
    text = f"packets of {mtu} bytes"
    if mtu > _USUAL_MTU:
        ping = ("ping", "-c", "1", "-W", "1", "-M", "do", "-s")
        has_passed = machine.run(*ping, str(mtu - _ICMP_HEADER_BYTES[family]), address) is not None
        if not has_passed and machine.run(*ping, "56", address) is not None:
            advice = f"set the MTU of every switch on the way to {mtu} or more, or that of both hosts to 1500"
            yield Finding(Level.WARN, title, f"{text} do not arrive, small ones do", advice)
            return
        text += " arrive" if has_passed else " on both sides; whether they arrive is not known"
    yield Finding(Level.OK, title, text)


async def _probe(open_it: OpenProbe) -> list[Finding]:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            probe = await open_it()
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            who = await probe.handshake()
    except ConfigError as error:
        return [Finding(Level.WARN, "handshake", f"not tried: {error}")]
    except (MooncakeError, OSError) as error:
        found = f"the port is open, but the handshake failed: {_reason(error)}"
        advice = (
            "both sides need the same version, the same cluster key, and TLS (security.tls_*) or none;"
            " the port must be messenger.port"
        )
        return [Finding(Level.FAIL, "handshake", found, advice)]
    findings = [Finding(Level.OK, "handshake", f"{who} answers")]
    try:
        bytes_per_s = await _measure(probe.bandwidth)
    except (MooncakeError, OSError) as error:
        found = f"tcp carries nothing: {_reason(error)}"
        findings.append(
            Finding(Level.FAIL, "bandwidth", found, "look for what drops packets between the two")
        )
    else:
        findings.append(Finding(Level.OK, "bandwidth", f"tcp {as_size(int(bytes_per_s))}/s"))
    return findings + [await _rdma_bandwidth(probe, nic) for nic in probe.nics]


async def _rdma_bandwidth(probe: PeerProbe, nic: str) -> Finding:
    try:
        bytes_per_s = await _measure(partial(probe.rdma_bandwidth, nic))
    except (MooncakeError, OSError) as error:
        found = f"rdma from {nic} carries nothing: {_reason(error)}"
        advice = (
            "if the other side has RDMA, run mooncake-doctor there too, and look at MTUs and RoCE on the way"
        )
        return Finding(Level.WARN, "rdma bandwidth", found, advice)
    return Finding(Level.OK, "rdma bandwidth", f"from {nic} {as_size(int(bytes_per_s))}/s")


async def _measure(bandwidth: Callable[[int], Awaitable[float]]) -> float:
    """Return the measured bytes a second.

    A first measurement with few bytes sets the size of a second one, which takes about half a second.
    """
    async with asyncio.timeout(BANDWIDTH_TIMEOUT_S):
        bytes_per_s = await bandwidth(FIRST_BYTES)
        num_bytes = int(bytes_per_s * _MEASURED_S) // FIRST_BYTES * FIRST_BYTES
        if num_bytes <= FIRST_BYTES:
            return bytes_per_s
        return await bandwidth(min(num_bytes, MOST_BYTES))


def _reason(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
