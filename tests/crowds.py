"""Crowds of hostile peers, which send as much as is accepted and then stay connected."""

import contextlib
import itertools
import resource
import selectors
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.deadline import DEADLINE_S

MIB = 1 << 20
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)
QUIET_S = 2.0
"""Seconds without an accepted byte after which a peer stops sending."""
_PIECE = bytes(1 << 18)
_HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"

Opening = tuple[bytes, int]
"""The first bytes of a peer, and the number of zeros that follow them."""


def zmtp_frame(num_bytes: int) -> Opening:
    """Return a frame of ZeroMQ's handshake without its last byte."""
    return ZMTP_GREETING + b"\x06" + num_bytes.to_bytes(8, "big"), num_bytes - 1


def http_body(num_bytes: int) -> Opening:
    """Return a request whose body lacks its last byte."""
    return _HTTP + b"Content-Length: %d\r\n\r\n" % num_bytes, num_bytes - 1


def http_head(num_bytes: int) -> Opening:
    return _HTTP + b"X: " + b"x" * num_bytes, 0


@contextlib.contextmanager
def crowd(ports: Sequence[int], openings: Sequence[Opening], num_each: int) -> Iterator[None]:
    """Make a context with `num_each` peers at each port, which have sent as much as was accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as peers, selectors.DefaultSelector() as selector:
            for port, opening, _ in zip(
                itertools.cycle(ports), itertools.cycle(openings), range(num_each * len(ports)), strict=False
            ):
                with contextlib.suppress(OSError):
                    peer = peers.enter_context(
                        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
                    )
                    peer.setblocking(False)
                    selector.register(peer, selectors.EVENT_WRITE, list(opening))
            while selector.get_map() and (ready := selector.select(QUIET_S)):
                for key, _ in ready:
                    if not _say_more(key.fileobj, key.data):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _say_more(peer: socket.socket, left: list[bytes | int]) -> bool:
    """Send more. Returns whether something is left to send, and the connection is open."""
    beginning, num_zeros = left
    assert isinstance(beginning, bytes)
    assert isinstance(num_zeros, int)
    try:
        if beginning:
            left[0] = beginning[peer.send(beginning) :]
        elif num_zeros:
            left[1] = num_zeros - peer.send(memoryview(_PIECE)[:num_zeros])
        else:
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens."""
    own = {entry.readlink().name for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own
    ]


def resident_bytes(pid: int) -> int:
    """Return the bytes of memory that a process has for itself, without shared memory."""
    return _status_bytes(pid, "RssAnon:")


def most_resident_bytes(pid: int) -> int:
    """Return the most bytes of memory that a process has had."""
    return _status_bytes(pid, "VmHWM:")


def _status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024
