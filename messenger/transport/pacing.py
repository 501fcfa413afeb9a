"""Congestion control of connections between messengers, so that nothing is paced within one host.

Within a host there is no network to protect, and BBR's pacing costs a quarter of the bandwidth. The kernel
goes on pacing even when another congestion control takes over. So where BBR is the system's default, a
connection begins with Reno, and BBR takes over if the other end is on another host.

Owns: the choice of congestion control. Does not know: the data.
"""

import functools
import logging
import socket

from messenger.transport.tls import TlsSocket

log = logging.getLogger(__name__)

UNPACED = b"reno"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


def begin_unpaced(sock: socket.socket | TlsSocket) -> None:
    """Set the congestion control of a socket to Reno, before it connects or listens.

    Accepted connections inherit it.
    """
    if _system_paces():
        _change(sock, UNPACED)


def choose_by_peer(sock: socket.socket | TlsSocket) -> None:
    """Choose the congestion control of a new connection by the place of its peer, before anything is sent.

    Between hosts, a congestion control that the route or another program has set is kept.
    """
    try:
        is_local = sock.getpeername()[0] == sock.getsockname()[0]
    except OSError:  # already disconnected: the receiving task notices
        return
    if is_local:
        _change(sock, UNPACED)
    elif _system_paces() and congestion_control_of(sock) == UNPACED:
        _change(sock, systems_own())


@functools.cache
def systems_own() -> bytes:
    """Return the name of the system's default congestion control."""
    with socket.socket() as sock:
        return congestion_control_of(sock)


def congestion_control_of(sock: socket.socket | TlsSocket) -> bytes:
    """Return the name of a connection's congestion control."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")


def _system_paces() -> bool:
    return systems_own().startswith(b"bbr")


def _change(sock: socket.socket | TlsSocket, name: bytes) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError as error:  # not allowed to this process, see net.ipv4.tcp_allowed_congestion_control
        log.warning("a connection has no congestion control %s: %s", name.decode(), error)
