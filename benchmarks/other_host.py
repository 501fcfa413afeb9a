"""Another host on this machine: a network namespace with a link to this host, whose bandwidth can be limited.

Owns: the namespace, the link. Does not know: which processes run there.
"""

import contextlib
import ctypes
import math
import secrets
import subprocess
from collections.abc import Iterator

HERE, THERE = "10.78.0.1", "10.78.0.2"
"""The addresses of this host and of the other host."""
_CLONE_NEWNET = 0x40000000
_BURST_BYTES = 64 << 10
"""The most bytes that a limited link sends at once, those of one large packet of TCP."""
_QUEUE_BYTES = 4 << 20
"""The bytes that wait for a limited link before packets are lost: more than TCP has in flight there."""


@contextlib.contextmanager
def other_host() -> Iterator[str]:
    """Make a context with another host, and yield its name for `enter`. Only root can make one."""
    name = f"mooncake-{secrets.token_hex(3)}"
    near, far = f"{name[-6:]}a", _far_end(name)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("address", "add", f"{HERE}/24", "dev", near)
        _ip("link", "set", near, "up")
        for arguments in (("address", "add", f"{THERE}/24", "dev", far), ("link", "set", far, "up")):
            _ip("-n", name, *arguments)
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name)


def enter(name: str) -> None:
    """Move this thread, and the processes that it starts, to the other host `name`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def limit(name: str, bits_per_s: float) -> None:
    """Limit what the other host sends to this host, by a token bucket of the kernel; `inf`: no limit."""
    of_link = ["dev", _far_end(name), "root"]
    subprocess.run(["tc", "-n", name, "qdisc", "delete", *of_link], check=False, stderr=subprocess.DEVNULL)
    if not math.isinf(bits_per_s):
        bucket = [
            "tbf",
            "rate",
            f"{bits_per_s:.0f}bit",
            "burst",
            str(_BURST_BYTES),
            "limit",
            str(_QUEUE_BYTES),
        ]
        subprocess.run(["tc", "-n", name, "qdisc", "add", *of_link, *bucket], check=True)


def _far_end(name: str) -> str:
    """Return the other host's end of the link."""
    return f"{name[-6:]}b"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
