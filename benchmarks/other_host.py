"""Another host on this machine: a network namespace with a link to this host.

Owns: the namespace. Does not know: which processes run there.
"""

import contextlib
import ctypes
import secrets
import subprocess
from collections.abc import Iterator

HERE, THERE = "10.78.0.1", "10.78.0.2"
"""The addresses of this host and of the other host."""
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def other_host() -> Iterator[str]:
    """Make a context with another host, and yield its name for `enter`. Only root can make one."""
    name = f"mooncake-{secrets.token_hex(3)}"
    near, far = f"{name[-6:]}a", f"{name[-6:]}b"
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


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
