"""Transports between two messengers: shared memory on one host, RDMA or TCP between hosts.

Over `shm` each side passes a descriptor of its segment once. The side that asks copies the bytes. A writer
copies into granted pages (see messenger.shm.copy_table). A reader copies out of blocks that it finds itself
(see messenger.shm.catalogue), or that their owner has found for the reader. If the writer cannot copy, the
receiver copies out of the writer's segment. Over `tcp` the payload follows the frame and is received straight
into the page, except small pieces. Over `rdma` bytes go from memory to memory, beside the connection of the
frames: see messenger.rdma.

Owns: choice of transport, opening sockets, moving one frame's bytes. Does not know: grants, acknowledgements.
"""

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, TypeVar, assert_never

from messenger.transport.pacing import begin_unpaced
from messenger.transport.stream import TURN_BYTES, Stream
from messenger.transport.tls import Tls
from messenger.wire.checksums import LayerChecksums, copy_layers, layer_checksums
from messenger.wire.protocol import SAME_TLS
from mooncake.config.sections import TransportChoice
from mooncake.doubling import Doubling
from mooncake.endpoints import preferred
from mooncake.errors import TransferError
from mooncake.messages.pools import MessengerAddress
from mooncake.node.mapping import MappedFile

_DISCARD_BYTES = 1 << 18
"""Bytes of an unwanted payload that are received at a time."""
_COPYING_SPEED = 2
"""Speed at which an inlet copies between segments, as a multiple of the speed through a socket.

With this value other tasks have a turn after 4 MiB of copying.
"""
_PIECE_BYTES = 1 << 18
"""Bytes received and hashed at a time, while they are in the processor's cache."""
_SMALL_VIEW_BYTES = 16 << 10
"""Average size of views below which one system call receives all views.

Larger views are received one by one.
"""


Number = TypeVar("Number", int, float)
log = logging.getLogger(__name__)


class Transport(StrEnum):
    """The kind of a connection, which decides how payload moves."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


def _of_each(zero: Number) -> dict[Transport, Number]:
    return dict.fromkeys(Transport, zero)


@dataclass(slots=True)
class PeerTraffic:
    """Bytes moved to and from one peer at this side's request, over all sessions."""

    sent_bytes: dict[Transport, int] = field(default_factory=lambda: _of_each(0))
    received_bytes: dict[Transport, int] = field(default_factory=lambda: _of_each(0))
    busy_s: dict[Transport, float] = field(default_factory=lambda: _of_each(0.0))
    """Seconds in which requests were in flight, by transport."""


@dataclass(slots=True)
class Traffic:
    """Payload bytes that a messenger has moved, per transport, and counters of failures."""

    sent_bytes: dict[Transport, int] = field(default_factory=lambda: _of_each(0))
    received_bytes: dict[Transport, int] = field(default_factory=lambda: _of_each(0))
    by_peer: defaultdict[str, PeerTraffic] = field(default_factory=lambda: defaultdict(PeerTraffic))
    num_checksum_failures: int = 0
    num_unauthenticated: int = 0
    """Connections that were closed because their peer did not prove that it has the cluster key."""
    _unauthenticated_lines: Doubling = field(default_factory=lambda: Doubling(1))

    def count_unauthenticated(self, reason: str) -> None:
        """Count an unauthenticated connection.

        It is logged only when the count has doubled, as anybody who reaches a port can connect any number of
        times.
        """
        self.num_unauthenticated += 1
        if self._unauthenticated_lines.is_due(self.num_unauthenticated):
            log.info(
                "%d unauthenticated connections have been refused so far, the last one: %s",
                self.num_unauthenticated,
                reason,
            )


class Path(NamedTuple):
    """A path to a messenger: a transport, and the address at which the messenger listens."""

    transport: Transport
    address: str | tuple[str, int]
    nic: str | None = None
    """The device of this side through which the bytes go; None: the kernel chooses."""
    is_standby: bool = False
    """Whether the path is for requests that no other path could carry, and for all if no other path is up."""

    def __str__(self) -> str:
        address = self.address if isinstance(self.address, str) else f"{self.address[0]}:{self.address[1]}"
        return f"{self.transport} {address}" if self.nic is None else f"{self.transport} {self.nic} {address}"


class Remedy(Enum):
    """The remedy that may help after a failed transfer, where a transport knows a remedy."""

    RETRY = "retry"
    """The same path may work with a new lane."""
    OTHER_PATH = "other path"
    """Another path may work: on this path the peer did not answer, or this path's device has failed."""
    GIVE_UP = "give up"
    """Nothing helps over this transport: the request itself was refused and would be again."""


def paths(
    choice: TransportChoice, host_id: str, address: MessengerAddress, nics: Sequence[str]
) -> list[list[Path]]:
    """Return lists of paths to `address` from the host `host_id`, whose RDMA devices are `nics`.

    The paths of a list are used together. A list is tried if no path of the lists before it works. Raises
    TransferError if shared memory is demanded, and `address` is on another host.
    """
    by_memory = [Path(Transport.SHM, address.unix_path)]
    by_network = [Path(Transport.TCP, endpoint) for endpoint in address.tcp_endpoints]
    by_rdma = [Path(Transport.RDMA, address.tcp_endpoints[0], nic) for nic in nics]
    shares_host = host_id == address.host_id
    match choice:
        case "tcp":
            return [by_network]
        case "rdma":
            return [by_rdma]
        case "auto":
            between_hosts = [*by_rdma, *(path._replace(is_standby=bool(by_rdma)) for path in by_network)]
            return [by_memory, between_hosts] if shares_host else [between_hosts]
        case "shm":
            if not shares_host:
                raise TransferError(
                    f"transport shm needs one host, but {address.instance} is on {address.host_id}"
                    f" and this is {host_id}; set transport: auto"
                )
            return [by_memory]
        case _:
            assert_never(choice)


async def connect(path: Path, tls: Tls | None) -> Stream:
    """Return a connected stream.

    Raises OSError. Raises TransferError for an invalid address, and for a peer without the same TLS.
    """
    try:
        family, address = await _resolved(path.address)
    except ValueError as error:
        raise TransferError(str(error)) from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            begin_unpaced(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
        stream = Stream(tls.connect(sock) if tls is not None and family != socket.AF_UNIX else sock)
    except BaseException as error:
        sock.close()
        if isinstance(error, ValueError | OverflowError):
            raise TransferError(str(error)) from None
        raise
    try:
        await stream.shake_hands()
    except BaseException as error:
        stream.close()
        if isinstance(error, OSError):
            raise TransferError(f"no TLS: {error}; {SAME_TLS}") from None
        raise
    return stream


async def _resolved(named: str | tuple[str, int]) -> tuple[int, str | tuple[str, int]]:
    """Return the family and address of a socket at a path, or at a host and port.

    Raises OSError, ValueError.
    """
    if isinstance(named, str):
        return socket.AF_UNIX, named
    host, port = named
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, address = preferred(found)
    return family, (address, port)


class SourceLayers(Protocol):
    """The interface of the sender's description of some layers of a block: `WriteEntry` or `FoundBlock`."""

    @property
    def source_offset(self) -> int: ...


class Inlet:
    """Base class of inlets. Bytes come beside the connection, except in `TcpInlet`.

    Both ends of a lane have an inlet: the receiver for writes, the sender for the blocks that it fetches. The
    sender has an `Outlet` beside it (`messenger.sender.outlet`).
    """

    transport: ClassVar[Transport]
    has_payload: ClassVar[bool] = False
    """Whether bytes follow their frame over the connection, in both directions."""
    is_mapped: ClassVar[bool] = False
    """Whether each side has mapped the other's segment."""

    def check(self, num_bytes: int, payload_bytes: int) -> None:
        """Check that a frame for `num_bytes` of layers may have `payload_bytes` of payload.

        Raises TransferError.
        """
        expect_payload(0, payload_bytes)

    async def fill(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes]:
        """Fill `views`, and return the little-endian xxh3-64 of the layers of each view, concatenated.

        A view has some layers of a block, `layer_bytes` bytes each. Raises OSError or TransferError.
        """
        checksums = self.fill_now(sources, views, layer_bytes)
        assert checksums is not None, "an inlet that cannot fill at once has a `fill` of its own"
        return checksums

    def fill_now(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes] | None:
        """Fill `views` without waiting, and return what `fill` returns.

        Returns None if that is impossible; then `fill` must be called with the same arguments. Raises OSError
        or TransferError.
        """
        raise NotImplementedError

    async def discard(self, payload_bytes: int) -> None:
        """Receive and drop an unwanted payload. Raises TransferError if the frame must not have a payload."""
        expect_payload(0, payload_bytes)


class ShmInlet(Inlet):
    """The inlet that copies out of the peer's segment, which it maps. Takes ownership of `fd`."""

    transport, is_mapped = Transport.SHM, True

    def __init__(
        self, stream: Stream, fd: int | None, segment_bytes: int | None, *, is_writable: bool = False
    ) -> None:
        """Map the peer's segment, also for writing if `is_writable`. Raises TransferError."""
        self._stream = stream
        if fd is None:
            raise TransferError("a segment is announced, but no descriptor came along")
        try:
            size_bytes = os.fstat(fd).st_size
            if segment_bytes is None or not 0 < segment_bytes <= size_bytes:
                raise TransferError(
                    f"the peer's segment has {size_bytes} bytes, it announces {segment_bytes}"
                )
            self.segment = MappedFile(fd, segment_bytes, read_only=not is_writable).view
        finally:
            os.close(fd)  # the mapping stays

    def fill_now(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes]:
        checksums = []
        for source, view in zip(sources, views, strict=True):
            offset = source.source_offset
            end = offset + len(view)
            if not 0 <= offset <= end <= len(self.segment):
                raise TransferError(
                    f"source range [{offset}, {end}) is outside a segment of {len(self.segment)} bytes"
                )
            checksums.append(copy_layers(self.segment[offset:end], view, layer_bytes))
            self._stream.moved(len(view) // _COPYING_SPEED)
        return checksums


class TcpInlet(Inlet):
    """The inlet that receives from the stream: large views directly, small ones through its buffer."""

    transport, has_payload = Transport.TCP, True

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._arrivals: list[LayerChecksums] = []
        """Views of the frame whose payload is being received. They are filled and hashed in order."""

    def check(self, num_bytes: int, payload_bytes: int) -> None:
        expect_payload(num_bytes, payload_bytes)

    def fill_now(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes] | None:
        stream = self._stream
        num_bytes = sum(map(len, views))
        if num_bytes <= stream.num_ahead or num_bytes < _SMALL_VIEW_BYTES * len(views):
            if not stream.has_ahead(num_bytes):
                return None
            checksums = []
            for view in views:
                checksums.append(copy_layers(stream.ahead[: len(view)], view, layer_bytes))
                stream.take(len(view))
            return checksums
        self._arrivals = [LayerChecksums(view, layer_bytes) for view in views]
        try:
            for arrival in self._arrivals:
                while not arrival.is_whole:
                    if stream.is_turn_over:
                        return None
                    self._receive(arrival)
        except BlockingIOError:
            return None
        return self._take_checksums()

    async def fill(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes]:
        if not self._arrivals:
            await self._stream.receive_into(views)
            return [layer_checksums(view, layer_bytes) for view in views]
        for arrival in self._arrivals:
            while not arrival.is_whole:
                await self._stream.receive_with(partial(self._receive, arrival))
        return self._take_checksums()

    def _receive(self, arrival: LayerChecksums) -> None:
        """Receive a part of a view and hash it. Raises BlockingIOError if nothing is there yet."""
        stream, begin = self._stream, arrival.num_there
        if arrival.can_receive and stream.is_plain and not stream.num_ahead:
            stream.received(arrival.receive(stream.fileno, begin + TURN_BYTES))
        else:
            arrival.advance(begin + stream.receive_now([arrival.block[begin : begin + _PIECE_BYTES]]))

    def _take_checksums(self) -> list[bytes]:
        arrivals, self._arrivals = self._arrivals, []
        return [arrival.packed() for arrival in arrivals]

    async def discard(self, payload_bytes: int) -> None:
        scratch = memoryview(bytearray(min(payload_bytes, _DISCARD_BYTES)))
        while payload_bytes:
            payload_bytes -= await self._stream.receive_some([scratch[:payload_bytes]])


def expect_payload(expected_bytes: int, payload_bytes: int) -> None:
    """Check that a payload has the expected length. Raises TransferError."""
    if payload_bytes != expected_bytes:
        raise TransferError(f"a frame came with {payload_bytes} bytes of payload, expected {expected_bytes}")
