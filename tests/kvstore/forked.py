"""Messenger processes that are forked (`tests.forked`).

Owns: what only messengers need. Does not know: what their configuration says.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.server import service
from mooncake.node.process import child_main
from mooncake.node.process_config import MessengerProcess
from tests.forked import Descriptor, Forked, preload, start_fork_server

_CLONE_NEWNET = 0x40000000
preload("tests.kvstore.preloaded")


class ForkedMessenger(Forked):
    """A process like `python -m kvstore.server.service`, with this process's environment, stdout and stderr.

    `network` is the network namespace of the process; None for that of this process.
    """

    def __init__(self, config: MessengerProcess, network: Path | None) -> None:
        read_fd, write_fd = os.pipe()
        self._stdin = os.fdopen(write_fd, "wb", buffering=0)
        segment, environ = Descriptor(config.segment_fd), dict(os.environ)
        super().__init__(_serve, network, segment, stdin=read_fd, stdout=1, stderr=2, environ=environ)
        os.close(read_fd)
        self._stdin.write(config.model_dump_json().encode() + b"\n")

    def hang_up(self) -> None:
        """Close the messenger's stdin, which ends it."""
        self._stdin.close()

    def close(self) -> None:
        super().close()
        self.hang_up()


def _serve(network: Path | None, segment_fd: int) -> None:
    if network is not None:
        enter(network)

    async def serve(config: MessengerProcess) -> None:
        await service.serve(config.model_copy(update={"segment_fd": segment_fd}))

    child_main(MessengerProcess, serve, service.event_loop)


@contextlib.contextmanager
def entered(network: Path) -> Iterator[None]:
    """Make a context in which new threads and processes are in a network namespace.

    Processes of `tests.forked` are not in it.
    """
    start_fork_server()
    with open("/proc/self/ns/net") as home:
        enter(network)
        try:
            yield
        finally:
            enter(Path(f"/proc/self/fd/{home.fileno()}"))


def enter(network: Path) -> None:
    """Move this thread, and processes that it starts later, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
