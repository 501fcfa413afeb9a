"""The limits of the machine as stores of the workload: plain copies, raw sockets, dictionary lookups.

Owns: the limits in memory and on sockets. Does not know: any pool.
"""

import mmap
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.kvstore.echo import DONE, KEY_BYTES, REQUEST, receive, send_all
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Bytes
from messenger.transport.pacing import UNPACED

ROOT = Path(__file__).resolve().parents[2]
_SOCKET_BUFFER_BYTES = 256 << 10  # stays in the cache: faster over loopback than what the kernel chooses


class Memcpy:
    """Copies between the caller's memory and a memfd whose pages exist, in one thread."""

    def __init__(self) -> None:
        fd = os.memfd_create("memcpy")
        os.posix_fallocate(fd, 0, WORKING_SET_BYTES)
        self._memory = np.frombuffer(mmap.mmap(fd, WORKING_SET_BYTES), np.uint8)
        os.close(fd)

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        self._sources, self._destinations = list(sources), list(destinations)
        self._blocks = list(self._memory.reshape(sources.shape))

    def remove(self, indices: Sequence[int]) -> None:
        pass

    def put(self, indices: Sequence[int]) -> None:
        for i in indices:
            np.copyto(self._blocks[i], self._sources[i])

    def get(self, indices: Sequence[int]) -> None:
        for i in indices:
            np.copyto(self._destinations[i], self._blocks[i])


class RawStream:
    """One connection to a process on this host. The process holds the blocks and acknowledges each put."""

    def __init__(self, family: Literal["tcp", "unix"]) -> None:
        self._connect = tcp_pair if family == "tcp" else socket.socketpair
        self._sock: socket.socket | None = None

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        self.close()
        self._sources = [memoryview(block) for block in sources]
        self._destinations = [memoryview(block) for block in destinations]
        self._sock, other = self._connect()
        for sock in (self._sock, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self._process = serve("blocks", other, *sources.shape)

    def remove(self, indices: Sequence[int]) -> None:
        pass

    def put(self, indices: Sequence[int]) -> None:
        assert self._sock is not None
        request = REQUEST.pack(b"p", indices[0], len(indices))
        send_all(self._sock, [request, *(self._sources[i] for i in indices)])
        if self._sock.recv(len(DONE)) != DONE:
            raise RuntimeError("the other end of the stream has ended")

    def get(self, indices: Sequence[int]) -> None:
        assert self._sock is not None
        self._sock.sendall(REQUEST.pack(b"g", indices[0], len(indices)))
        if not all(receive(self._sock, self._destinations[i]) for i in indices):
            raise RuntimeError("the other end of the stream has ended")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._process.wait()


class SeqpacketKeys:
    """Keys sent through a SOCK_SEQPACKET socket. The answer has one byte per key."""

    def __init__(self) -> None:
        self._sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = serve("keys", other, 0, 0)

    def exists(self, indices: Sequence[int]) -> None:
        self._sock.send(bytes(KEY_BYTES * len(indices)))
        if len(self._sock.recv(len(indices))) != len(indices):
            raise RuntimeError("the other end of the socket has ended")

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


class DictKeys:
    """A dictionary with the same number of keys as the stores."""

    def __init__(self, num_keys: int) -> None:
        self._keys = [random.randbytes(KEY_BYTES) for _ in range(num_keys)]
        self._index = {key: page for page, key in enumerate(self._keys)}

    def exists(self, indices: Sequence[int]) -> None:
        find = self._index.get
        if None in [find(self._keys[i]) for i in indices]:
            raise RuntimeError("a key is missing")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback.

    It is unpaced, like the messenger's connections within a host.
    """
    sock = socket.socket()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for end in (listener, sock):  # before they are connected: see messenger.transport.pacing
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        sock.connect(listener.getsockname())
        other, _ = listener.accept()
    for end in (sock, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock, other


def serve(kind: str, sock: socket.socket, num_blocks: int, block_bytes: int) -> subprocess.Popen[bytes]:
    """Start the other process. It then owns `sock`."""
    fd = sock.detach()
    command = [
        sys.executable,
        "-m",
        "benchmarks.kvstore.echo",
        kind,
        *map(str, (fd, num_blocks, block_bytes)),
    ]
    process = subprocess.Popen(command, pass_fds=[fd], cwd=ROOT)
    os.close(fd)
    return process
