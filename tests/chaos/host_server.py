"""Nodes on hosts that are network namespaces.

Owns: the network and the names that a node's processes see. Does not know: what runs on the other hosts.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.network import Place
from tests.cluster.forked import ForkedServer, supervise
from tests.cluster.harness import ROOT
from tests.kvstore.forked import enter

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x00020000, 0x1000, 0x4000, 0x40000


class HostServer(ForkedServer):
    """A node on a host. If there is a `hosts_file`, the node's processes read it as /etc/hosts."""

    def __init__(
        self, place: Place, *arguments: str, run_dir: Path, port: int, hosts_file: Path | None = None
    ) -> None:
        super().__init__(*arguments, run_dir=run_dir, port=port)
        self.place, self._hosts_file = place, hosts_file

    @property
    def url(self) -> str:
        return f"http://{self.place.bracketed}:{self.port}"

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        return partial(supervise_on, self.place.network, self._hosts_file)


def supervise_on(
    network: Path | None, hosts_file: Path | None, arguments: list[str], folder: Path = ROOT
) -> None:
    """Run the supervisor of a node in the network namespace `network`; None for this process's namespace."""
    if network is not None:
        enter(network)
    if hosts_file is not None:
        use_hosts_file(hosts_file)
    supervise(arguments, folder)


def use_hosts_file(path: Path) -> None:
    """Make this process and its children read `path` whenever they read /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = (b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    bound = (os.fsencode(path), b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(*private) or libc.mount(*bound):
        raise OSError(ctypes.get_errno(), f"cannot use {path} as /etc/hosts")
