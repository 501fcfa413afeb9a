"""Addresses of sockets, IPv4 or IPv6: where a process listens, and what other processes are told.

A name means its IPv4 addresses, or its IPv6 addresses if it has no IPv4 address.

If the other end vanishes without a word, TCP alone notices it after a quarter of an hour, and never if
nothing is sent. The ZeroMQ sockets that are prepared here give up such a connection after some seconds, and
look up the name again.

Owns: these rules. Does not know: the kinds of sockets, messages, keys.
"""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import zmq

_ANY_PORT = "*"
_CONNECT_TIMEOUT_MS = 5_000
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _NUM_KEEPALIVES = 4, 2, 3
"""Seconds of silence before TCP probes, seconds between probes, and number of probes without an answer."""
_UNACKNOWLEDGED_MS = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _NUM_KEEPALIVES)
"""Milliseconds after which a connection is lost if the peer's kernel acknowledges nothing.

More than the usual `conductor.peer_timeout_s`, after which the peer counts as dead in any case.
"""


def listen(listener: "zmq.Socket[Any]", endpoint: str) -> str:
    """Bind a ZeroMQ socket. Returns the endpoint with its actual port. Raises ZMQError."""
    _prepare(listener, endpoint)
    listener.bind(endpoint)
    return bytes(listener.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def connect(caller: "zmq.Socket[Any]", endpoint: str) -> None:
    """Connect a ZeroMQ socket. Raises ZMQError."""
    _prepare(caller, endpoint)
    caller.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    caller.connect(endpoint)


def _prepare(either: "zmq.Socket[Any]", endpoint: str) -> None:
    either.ipv6 = needs_ipv6(endpoint)
    either.setsockopt(zmq.TCP_KEEPALIVE, 1)
    either.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    either.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    either.setsockopt(zmq.TCP_KEEPALIVE_CNT, _NUM_KEEPALIVES)
    either.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)


def advertised(endpoint: str, bound: str) -> str:
    """Return the endpoint that other processes get: `endpoint`, with the actual port instead of `*`.

    `bound` is the endpoint to which the socket is bound, with the actual port.
    """
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{bound.rpartition(':')[2]}" if port == _ANY_PORT else endpoint


def preferred(found: Sequence[tuple[Any, Any, Any, Any, Any]]) -> tuple[socket.AddressFamily, str]:
    """Return family and text of the preferred address in `found`, the results of `getaddrinfo`.

    `found` must not be empty.
    """
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, str(address[0])


def bracketed(host: str) -> str:
    """Return a host in the form for URLs and endpoints, where an IPv6 address has brackets."""
    return f"[{host}]" if ":" in host else host


def is_any_address(host: str) -> bool:
    """Return whether a host stands for all addresses of this machine, and so is useless to other nodes."""
    try:
        return host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def needs_ipv6(endpoint: str) -> bool:
    """Return whether the host of an endpoint has IPv6 addresses only."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return host.startswith("[") or (not _is_ipv4(host) and _has_ipv6_alone(host))


def _is_ipv4(host: str) -> bool:
    try:
        return host == "*" or ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def _has_ipv6_alone(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # libzmq tries again, as long as the socket lives
    return preferred(found)[0] == socket.AF_INET6
