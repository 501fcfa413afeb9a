"""Ports for servers that must know their port before they start."""

import contextlib
import random
import socket
from pathlib import Path

_GIVEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port. The kernel does not give it to processes that ask for any port."""
    first_given = int(_GIVEN_BY_KERNEL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first_given // 2, first_given)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
