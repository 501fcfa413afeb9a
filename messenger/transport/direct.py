"""Direct placement: a frame's payload goes from the socket to where it belongs before its head is read here.

Compiled code (direct.cpp) receives what comes next. Of a write that the tables of openings let pass, or of
the answer to the oldest fetch, it receives the payload too, hashes it, and acknowledges the write. A fetch of
blocks that the catalogue has is answered. What is done with the frame after that is the same as always: only
that its bytes are there, and the answer has left.

Who asks for little sends that in the same call, and of the expected answer nothing is left to be read.

Owns: what was received ahead of whoever reads the frame. Does not know: connections, messages.
"""

import functools
import os
from collections.abc import Sequence
from ctypes import (
    CDLL,
    Structure,
    addressof,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_ssize_t,
    c_uint8,
    c_uint64,
    c_void_p,
)
from typing import NamedTuple, Self

from messenger.native import SOURCES
from messenger.shm.catalogue import Catalogue
from messenger.transport.openings import OpenPages, OpenTransfers
from messenger.transport.source import SourceSegment
from messenger.wire.checksums import CHECKSUM_BYTES, SHORT_LAYER_BYTES, LayerChecksums, address_of
from mooncake.native import load_or_do_without

_MOST_TARGETS, _MOST_LAYERS, _MOST_HEAD_BYTES = 64, 256, 4096


class _Target(Structure):
    """`Target` of direct.cpp."""

    _fields_ = (("begin", c_void_p), ("num_bytes", c_uint64))


class _Placement(Structure):
    """`Placement` of direct.cpp."""

    _fields_ = (
        ("pages", c_void_p),
        ("transfers", c_void_p),
        ("answer", c_void_p),
        ("answer_bytes", c_uint64),
        ("segment", c_void_p),
        ("segment_fd", c_int64),
        ("shelf", c_void_p),
        ("may_answer", c_uint64),
        ("may_answer_fetches", c_uint64),
        ("expected", _Target),
        ("expected_layer_bytes", c_uint64),
        ("num_ahead", c_uint64),
        ("num_received", c_uint64),
        ("num_targets", c_uint64),
        ("num_there", c_uint64),
        ("num_hashed", c_uint64),
        ("layer_bytes", c_uint64),
        ("num_answered", c_uint64),
        ("num_asked", c_uint64),
        ("is_answered", c_uint64),
        ("num_head", c_uint64),
        ("num_sent", c_uint64),
        ("targets", _Target * _MOST_TARGETS),
        ("state", c_uint64 * 8),
        ("digests", c_uint64 * _MOST_LAYERS),
        ("head", c_uint8 * _MOST_HEAD_BYTES),
    )


@functools.cache
def _native() -> CDLL | None:
    library = load_or_do_without(SOURCES / "direct.cpp", "what comes by TCP is placed more slowly")
    if library is None:
        return None
    library.receive_direct.argtypes = (c_int, c_void_p, c_size_t, c_void_p, c_int, c_int64)
    library.exchange.argtypes = (
        c_int,
        c_char_p,
        c_size_t,
        c_int64,
        c_size_t,
        c_void_p,
        c_size_t,
        c_void_p,
        c_int,
        c_int64,
    )
    library.receive_direct.restype = library.exchange.restype = c_ssize_t
    return library


def can_expect(view: memoryview, layer_bytes: int) -> bool:
    """Whether whole layers can be placed in `view` before the frame that brings them is read."""
    return layer_bytes > SHORT_LAYER_BYTES and len(view) <= _MOST_LAYERS * layer_bytes


def prepare() -> None:
    """Compiles the code, if that has not been done: so that no request waits for it."""
    _native()


class Placed(NamedTuple):
    """What is there of a payload."""

    checksums: list[bytes]
    """of the views that are filled, one after the other"""
    arriving: LayerChecksums | None
    """the next one, if there is one"""


class Sent(NamedTuple):
    """Of the answer to a fetch."""

    head: bytes
    """the frame, without the blocks behind it"""
    num_bytes: int
    """of both that have left"""


class DirectPlacement:
    """Of one connection, whose bytes are plain."""

    def __init__(self, native: CDLL) -> None:
        self._native = native
        self._placement = _Placement()
        self._address = addressof(self._placement)
        self._kept: tuple[object, ...] = ()
        """what the compiled code looks at"""
        self._asked: tuple[object, ...] = ()
        """the same, for what is asked"""
        self._buffer: memoryview | None = None
        self._buffer_address = 0

    @classmethod
    def where_it_can_be(cls) -> Self | None:
        """None where nothing can be compiled."""
        native = _native()
        return None if native is None else cls(native)

    def let_in(
        self,
        pages: OpenPages,
        transfers: OpenTransfers,
        answer: bytes,
        source: SourceSegment,
        catalogue: Catalogue | None,
    ) -> None:
        """From now on writes go to `pages`. `answer` to those that are intact. What is fetched is found by
        `catalogue`, if there is one, in `source`, whose pages change on this thread only."""
        if pages.layer_bytes > SHORT_LAYER_BYTES:
            placement, text = self._placement, memoryview(answer)
            placement.pages, placement.transfers = pages.address, transfers.address
            placement.answer, placement.answer_bytes = address_of(text), len(text)
            self._send_from(source)
            placement.shelf = None if catalogue is None else catalogue.shelf_address
            self._kept = (pages, transfers, text, source, catalogue)

    def ask(self, source: SourceSegment, answer: bytes) -> None:
        """From now on writes are sent, of blocks in `source`, which are answered so."""
        placement, text = self._placement, memoryview(answer)
        placement.answer, placement.answer_bytes = address_of(text), len(text)
        self._send_from(source)
        self._asked = (source, text)

    def _send_from(self, source: SourceSegment) -> None:
        self._placement.segment = address_of(source.buffer)
        self._placement.segment_fd = source.read_only_fd

    def expect(self, view: memoryview | None, layer_bytes: int = 0) -> None:
        """The next payload of this length, if any comes, is whole layers that belong there; None: nowhere."""
        placement = self._placement
        if view is None or not can_expect(view, layer_bytes):
            placement.expected.num_bytes, self._kept = 0, ()
        else:
            placement.expected.begin, placement.expected.num_bytes = address_of(view), len(view)
            placement.expected_layer_bytes, self._kept = layer_bytes, (view,)

    def receive(
        self,
        fd: int,
        buffer: memoryview,
        others: int = -1,
        within_s: float = 0.0,
        *,
        may_answer: bool = False,
        may_answer_fetches: bool = False,
    ) -> tuple[int, int]:
        """What comes next: how many bytes, and how many of them are in `buffer`, the payload that has been
        placed left out. Raises BlockingIOError, or another OSError. See `ReceiveFirst` of
        messenger.transport.stream.

        `may_answer`: nothing waits to be said before; `may_answer_fetches`: nor to be answered.
        """
        if buffer is not self._buffer:
            self._buffer, self._buffer_address = buffer, address_of(buffer)
        self._placement.may_answer = may_answer
        self._placement.may_answer_fetches = may_answer_fetches
        num_bytes: int = self._native.receive_direct(
            fd, self._buffer_address, len(buffer), self._address, others, int(1e9 * within_s)
        )
        return self._received(num_bytes)

    def exchange(
        self,
        fd: int,
        buffer: memoryview,
        others: int,
        within_s: float,
        *,
        head: bytes,
        offset: int,
        num_bytes: int,
    ) -> tuple[int, int]:
        """Sends `head`, and `num_bytes` of the source from `offset` on, which stay there until the answer
        has come: `num_asked` have left. If all have, it does what `receive` does."""
        if buffer is not self._buffer:
            self._buffer, self._buffer_address = buffer, address_of(buffer)
        num_received: int = self._native.exchange(
            fd,
            head,
            len(head),
            offset,
            num_bytes,
            self._buffer_address,
            len(buffer),
            self._address,
            others,
            int(1e9 * within_s),
        )
        return self._received(num_received)

    def _received(self, num_bytes: int) -> tuple[int, int]:
        if num_bytes < 0:
            raise OSError(-num_bytes, os.strerror(-num_bytes))
        if num_bytes == 0:
            raise ConnectionResetError("connection closed by the peer")
        return num_bytes, self._placement.num_ahead

    @property
    def num_asked(self) -> int:
        """Bytes of the latest request that have left."""
        num_bytes: int = self._placement.num_asked
        return num_bytes

    def take_answer(self) -> bytes | None:
        """The verified checksums of the block that was asked for, none of a write; None if the answer is
        still to be read."""
        placement = self._placement
        if not placement.is_answered:
            return None
        if not placement.num_targets:
            return b""
        placement.num_targets = 0
        num_layers = placement.num_there // placement.layer_bytes
        return bytes(placement.digests)[: num_layers * CHECKSUM_BYTES]

    @property
    def is_ahead(self) -> bool:
        """Whether something is there, or has left, that nobody has taken: its frame is in the buffer."""
        return bool(self._placement.num_targets or self._placement.num_head)

    def take(self, views: Sequence[memoryview], layer_bytes: int) -> Placed | None:
        """Whoever reads the frame has found that its payload belongs to `views`. None: it is still to be
        received."""
        placement = self._placement
        if not placement.num_targets:
            return None
        assert (placement.num_targets, placement.layer_bytes) == (len(views), layer_bytes)
        assert placement.targets[0].begin == address_of(views[0])
        placement.num_targets = 0
        digests = bytes(placement.digests)
        checksums: list[bytes] = []
        begin, left_bytes = 0, placement.num_there
        for view in views:
            if len(view) > left_bytes:
                arriving = LayerChecksums(view, layer_bytes)
                arriving.resume(left_bytes, placement.num_hashed, bytes(placement.state), digests[begin:])
                return Placed(checksums, arriving)
            end = begin + len(view) // layer_bytes * CHECKSUM_BYTES
            checksums.append(digests[begin:end])
            begin, left_bytes = end, left_bytes - len(view)
        return Placed(checksums, None)

    def take_num_answered(self) -> int:
        """How many bytes of the answer have left."""
        num_bytes: int = self._placement.num_answered
        self._placement.num_answered = 0
        return num_bytes

    def take_sent(self) -> Sent | None:
        """Whoever reads a fetch takes what of its answer has left, if that has begun."""
        placement = self._placement
        if not placement.num_head:
            return None
        sent = Sent(bytes(placement.head[: placement.num_head]), placement.num_sent)
        placement.num_head = 0
        return sent
