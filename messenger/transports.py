"""The ways bytes can take between two messengers: shared memory on one host, TCP between hosts.

Over `shm` the sender passes a read-only descriptor of its segment once, and the *receiver* copies into
its own pages: nobody ever maps another's segment writable. Over `tcp` the payload follows the frame and
is received straight into the page. Both sides of a transport stand here next to each other.

Owns: choice of path, connecting, moving one frame's bytes. Does not know: grants, acknowledgements.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from messenger.protocol import Frame, FrameReader, WriteEntry
from messenger.stream import Stream
from mooncake.config import TransportChoice
from mooncake.errors import TransferError
from mooncake.messages import MessengerAddress

_DISCARD_BYTES = 1 << 18


class Transport(StrEnum):
    """How a connection moves payload."""

    SHM = "shm"
    TCP = "tcp"


@dataclass(slots=True)
class Traffic:
    """What a messenger has moved: acknowledged payload bytes per transport, and what arrived damaged."""

    sent_bytes: dict[Transport, int] = field(default_factory=lambda: dict.fromkeys(Transport, 0))
    received_bytes: dict[Transport, int] = field(default_factory=lambda: dict.fromkeys(Transport, 0))
    num_checksum_failures: int = 0


def candidates(choice: TransportChoice, host_id: str, address: MessengerAddress) -> list[Transport]:
    """Transports to try towards `address`, the preferred one first."""
    shares_host = host_id == address.host_id
    if choice == "tcp" or (choice == "auto" and not shares_host):
        return [Transport.TCP]
    if choice == "auto":
        return [Transport.SHM, Transport.TCP]
    if not shares_host:
        raise TransferError(
            f"transport shm needs one host, but {address.instance} is on {address.host_id}"
            f" and this is {host_id}; set transport: auto"
        )
    return [Transport.SHM]


def open_socket(
    transport: Transport, address: MessengerAddress
) -> tuple[socket.socket, str | tuple[str, int]]:
    """An unconnected socket for `address` and the place to connect it to."""
    if transport is Transport.SHM:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address.unix_path
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), (address.tcp_host, address.tcp_port)


async def read_frame(stream: Stream, reader: FrameReader) -> Frame:
    """The next frame, without its payload. Raises OSError or TransferError if none comes."""
    while True:
        frame = reader.received(await stream.receive_some([reader.buffer()]))
        if frame is not None:
            return frame


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """The memory a messenger sends from: the whole segment, and a read-only descriptor of it."""

    buffer: memoryview
    read_only_fd: int

    @classmethod
    def of(cls, fd: int, buffer: memoryview) -> "SourceSegment":
        return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        os.close(self.read_only_fd)


class Inlet(Protocol):
    """Receiving end of one connection's payload."""

    transport: Transport

    def check(self, num_bytes: int, payload_bytes: int) -> None:
        """Raises TransferError if the payload does not fit a frame that writes `num_bytes`."""

    async def place(self, entries: Sequence[WriteEntry], pages: Sequence[memoryview]) -> None:
        """Fills `pages` with the bytes of `entries`."""

    async def discard(self, payload_bytes: int) -> None:
        """Takes a refused frame's payload off the wire. Raises TransferError if it must not have one."""


class ShmInlet:
    """Copies out of the sender's segment, mapped read-only."""

    transport = Transport.SHM

    def __init__(self, fd: int, segment_bytes: int) -> None:
        size_bytes = os.fstat(fd).st_size
        if not 0 < segment_bytes <= size_bytes:
            raise TransferError(
                f"the sender's segment has {size_bytes} bytes, its hello says {segment_bytes}"
            )
        self._buffer = memoryview(mmap.mmap(fd, segment_bytes, prot=mmap.PROT_READ))

    def check(self, num_bytes: int, payload_bytes: int) -> None:
        _expect_payload(0, payload_bytes)

    async def place(self, entries: Sequence[WriteEntry], pages: Sequence[memoryview]) -> None:
        for entry, page in zip(entries, pages, strict=True):
            end = entry.source_offset + len(page)
            if not 0 <= entry.source_offset <= end <= len(self._buffer):
                raise TransferError(
                    f"source range [{entry.source_offset}, {end}) is outside"
                    f" a segment of {len(self._buffer)} bytes"
                )
            page[:] = self._buffer[entry.source_offset : end]

    async def discard(self, payload_bytes: int) -> None:
        _expect_payload(0, payload_bytes)


class TcpInlet:
    """Receives from the stream straight into the pages."""

    transport = Transport.TCP

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def check(self, num_bytes: int, payload_bytes: int) -> None:
        _expect_payload(num_bytes, payload_bytes)

    async def place(self, entries: Sequence[WriteEntry], pages: Sequence[memoryview]) -> None:
        await self._stream.receive_into(pages)

    async def discard(self, payload_bytes: int) -> None:
        scratch = memoryview(bytearray(min(payload_bytes, _DISCARD_BYTES)))
        while payload_bytes:
            payload_bytes -= await self._stream.receive_some([scratch[:payload_bytes]])


def _expect_payload(expected_bytes: int, payload_bytes: int) -> None:
    if payload_bytes != expected_bytes:
        raise TransferError(f"a write came with {payload_bytes} bytes of payload, expected {expected_bytes}")
