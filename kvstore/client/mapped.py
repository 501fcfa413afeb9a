"""A pool on this host: calls over a Unix socket, blocks in the pool's own memory, mapped by the client.

Only the thread that uses the connection writes a page, and only while the page is reserved. So nobody writes
pages of a closed connection. When a client connects again under the same serial, its earlier connection has
stopped writing.

Owns: connections over Unix sockets, the mapping. Does not know: which connection is used when.
"""

import array
import os
import socket
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.client.connections import CopyLayers, PoolConnection, PoolURL, RemoteCall
from kvstore.pool.pages import PageState
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import Connected, Done, FromPool, Leased
from kvstore.protocol.calls import (
    MAX_MESSAGE_BYTES,
    Commit,
    Connect,
    EndLease,
    LeaseBlocks,
    Notice,
    SealBlocks,
)
from kvstore.protocol.frames import encode
from kvstore.protocol.packets import FD_SPACE, receive_soon, set_up
from messenger.wire.checksums import address_of, copy_layers, layer_checksums
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey

_DECODER = msgspec.msgpack.Decoder(FromPool)
_COPY_LEASE_S = 30.0
"""Seconds for which a copy leases its blocks: more than a copy takes."""
_TRIES = 40
"""Attempts to receive an answer before the thread sleeps."""
_POPULATED_BYTES = 64 * 1024
"""Pool pages of this many bytes or more are mapped by one system call each.

Smaller ones are mapped by page faults, 4 KiB at a time.
"""


class Mapping:
    """A segment mapped into this process, shared by all connections to its messenger."""

    def __init__(self, fd: int) -> None:
        segment = Segment.open(fd)
        assert segment is not None, "a messenger formats before it answers"
        self.segment = segment
        self.table = segment.page_table()
        self.file = _file_of(fd)
        self._is_populated = bytearray(segment.num_pages)
        self._populates = segment.page_stride >= _POPULATED_BYTES

    def view(self, page: int, layers: range) -> memoryview:
        """Return a view of `layers` of `page`."""
        if self._populates and not self._is_populated[page]:
            self._populate(page)
        return self.segment.layers_view(page, layers)

    def holds(self, key: BlockKey, page: int, layers: range, checksums: bytes) -> bool:
        """Return whether the bytes just read from `page` are this block's, and intact.

        `layers` are the layers that were read, and `checksums` those of the bytes that were read.

        If this process was paused for longer than its lease, the page may have another block by now. To
        notice this it is enough to read the state last, because `kvstore.pool.pages` writes a page's fields
        in a fixed order.
        """
        table = self.table
        return (
            table.checksums(page, layers) == checksums
            and table.key(page) == key
            and table.state(page) is PageState.SEALED
        )

    def _populate(self, page: int) -> None:
        self._is_populated[page] = True
        self.segment.populate(page)


class MappedConnection(PoolConnection):
    """A client's session over a Unix socket, with the pool's segment mapped. Made by `open`."""

    def __init__(self, sock: socket.socket, url: PoolURL, serial: int, timeout_s: float) -> None:
        super().__init__(sock, url, serial, timeout_s)
        self.mapping: Mapping
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._fds: list[int] | None = None
        """Descriptors received during the first call; None after it."""
        self._lock = threading.Lock()
        """Lock that keeps `end_lease` from using a socket that `close` has closed.

        The system may give the number of a closed descriptor to another file at once.
        """

    @classmethod
    def open(
        cls, url: PoolURL, connect: Connect, timeout_s: float, known: Mapping | None
    ) -> "MappedConnection":
        """Connect to the pool at `url`, and map its segment, unless `known` maps this segment already.

        Raises OSError if nothing answers or this process can open no more files, or the error with which the
        pool refuses.
        """
        assert url.unix_path is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = cls(sock, url, connect.serial, timeout_s)
        try:
            set_up(sock)
            try:
                sock.connect(url.unix_path)
            except BlockingIOError:
                raise TimeoutError(f"{url.text} accepts no connection within {timeout_s:g} s") from None
            except OSError as error:
                raise ConnectionRefusedError(f"nobody listens at {url.text}: {error}") from None
            connection._greet(connect, known)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connect: Connect, known: Mapping | None) -> None:
        fds = self._fds = []
        try:
            connected = self.call(connect, Connected)
            if len(fds) != 1:
                raise PoolError(f"{self.url.text} passed {len(fds)} descriptors, expected its segment's")
            self.mapping = known if known is not None and known.file == _file_of(fds[0]) else Mapping(fds[0])
        finally:
            self._fds = None
            for fd in fds:
                os.close(fd)  # the mapping stays
        self.address, self.fingerprint, self.layout = (
            connected.address,
            connected.fingerprint,
            connected.layout,
        )
        self.num_pages = self.mapping.segment.num_pages

    # -- messages ---------------------------------------------------------------------------------

    def notify(self, message: RemoteCall | Notice) -> None:
        packet = encode(message)
        try:
            self._sock.send(packet)
        except BlockingIOError:
            raise self._silent(socket.SO_SNDTIMEO) from None
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self) -> FromPool:
        try:
            if self._fds is None:
                num_bytes = self._receive_bytes()
            else:
                num_bytes, ancillary, _flags, _ = self._sock.recvmsg_into([self._buffer], FD_SPACE)
                for _level, _kind, data in ancillary:
                    self._fds.extend(array.array("i", data))
        except BlockingIOError:
            raise self._silent(socket.SO_RCVTIMEO) from None
        except OSError as error:
            raise self._gone(error) from error
        if num_bytes == 0:
            raise self._gone("it has closed the connection")
        message: FromPool = _DECODER.decode(self._buffer[:num_bytes])
        return message

    def _receive_bytes(self) -> int:
        """Receive a packet, and return its length.

        The socket is polled for a while, as most answers arrive within microseconds and a wake-up takes
        longer.
        """
        try:
            return receive_soon(self._sock, self._buffer, _TRIES)
        except BlockingIOError:
            return self._sock.recv_into(self._buffer)

    def close(self) -> None:
        with self._lock:
            super().close()

    # -- blocks -----------------------------------------------------------------------------------

    def lease(self, keys: Sequence[BlockKey], ttl_s: float) -> Leased:
        """Lease these blocks: the blocks that the pool has stay in their pages for `ttl_s` seconds."""
        return self.call(LeaseBlocks(self.next_id(), list(keys), ttl_s), Leased)

    def end_lease(self, lease_id: int) -> None:
        """End a lease. Any thread may call this method, at any time."""
        with self._lock:
            if self.is_open:
                self.notify(EndLease(lease_id))

    def is_intact(self, key: BlockKey, page: int) -> bool:
        """Return whether a leased page still holds this block, with bytes that match their checksums."""
        layers = range(self.layout.num_layers)
        checksums = layer_checksums(self.mapping.view(page, layers), self.layout.layer_bytes)
        return self.mapping.holds(key, page, layers, checksums)

    def _get_part(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], layers: range) -> list[bool]:
        leased = self.lease(keys, _COPY_LEASE_S)
        try:
            is_there = [
                page is not None and self._copy_out(key, page, buffer, layers)
                for key, page, buffer in zip(keys, leased.pages, buffers, strict=True)
            ]
        finally:
            self.notify(EndLease(leased.lease_id))
        damaged = [
            key
            for key, page, intact in zip(keys, leased.pages, is_there, strict=True)
            if page is not None and not intact
        ]
        self.report_damaged(damaged)
        return is_there

    def _copy_out(self, key: BlockKey, page: int, buffer: memoryview, layers: range) -> bool:
        checksums = copy_layers(self.mapping.view(page, layers), buffer, self.layout.layer_bytes)
        return self.mapping.holds(key, page, layers, checksums)

    def put(self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], timeout_s: float) -> None:
        for part in self.parts(len(keys)):
            self._put_part(keys[part], blocks[part], timeout_s)

    def _put_part(self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], timeout_s: float) -> None:
        layers, layer_bytes = range(self.layout.num_layers), self.layout.layer_bytes
        reservation = self.reserve(keys, timeout_s)
        try:
            checksums = [
                copy_layers(block, self.mapping.view(page.page, layers), layer_bytes)
                for page, block in zip(reservation.blocks, blocks, strict=True)
                if not page.sealed
            ]
            self.call(SealBlocks(self.next_id(), reservation.reservation_id, b"".join(checksums)), Done)
        except OSError:  # nobody answers: the connection will be closed, which ends the reservation
            raise
        except BaseException:
            self.release(reservation.reservation_id)
            raise

    def put_layers(self, keys: Sequence[BlockKey], copy: CopyLayers, timeout_s: float) -> None:
        for part in self.parts(len(keys)):
            self._put_layers_of(keys[part], part.start, copy, timeout_s)

    def _put_layers_of(
        self, keys: Sequence[BlockKey], first: int, copy: CopyLayers, timeout_s: float
    ) -> None:
        reservation = self.reserve(keys, timeout_s)
        try:
            missing = [index for index, block in enumerate(reservation.blocks) if not block.sealed]
            pages = [reservation.blocks[index].page for index in missing]
            for layers in self.layer_groups(len(missing)) if missing else ():
                targets = [address_of(self.mapping.view(page, layers)) for page in pages]
                positions = [first + index for index in missing]
                checksums = copy(layers, positions, np.array(targets, np.int64)).astype("<u8").tobytes()
                self.notify(Commit(reservation.reservation_id, layers.start, layers.stop, pages, checksums))
            self.release(reservation.reservation_id)
        except OSError:  # nobody answers: the connection will be closed, which ends the reservation
            raise
        except BaseException:
            self.release(reservation.reservation_id)
            raise


def _file_of(fd: int) -> tuple[int, int]:
    """Return the device and inode of the file behind a descriptor."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
