"""Congestion control of connections between messengers: within one host nothing is paced.

No network is to be spared there, and BBR's pacing costs a quarter of the bandwidth. The kernel goes on with
it when another congestion control takes over. So where BBR is the system's own a connection begins with Reno,
and BBR takes over if the other end is on another host.

Owns: that choice. Does not know: what is sent.
"""

import contextlib
import functools
import socket
from typing import Protocol

UNPACED = b"reno"
_PACING = b"bbr"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


class Connection(Protocol):
    """A socket, or what TLS makes of it."""

    def getsockname(self) -> tuple[str, int]: ...

    def getpeername(self) -> tuple[str, int]: ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def begin_unpaced(sock: socket.socket) -> None:
    """Before it connects, or listens: what it accepts begins so too."""
    if systems_own().startswith(_PACING):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


def choose(sock: Connection) -> None:
    """For a connection that has begun."""
    with contextlib.suppress(OSError):  # already disconnected: who receives finds out
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        elif systems_own().startswith(_PACING):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, systems_own())


@functools.cache
def systems_own() -> bytes:
    """The name of the congestion control that sockets have unless they are told."""
    with socket.socket() as sock:
        return congestion_control_of(sock)


def congestion_control_of(sock: socket.socket) -> bytes:
    """Its name."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")
