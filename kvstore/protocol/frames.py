"""Frames: how messages and blocks travel over TCP between a pool and a client on another host.

    bytes of the message u32 | bytes of the payload u64 (little-endian), the message (msgpack), the payload

The messages of a peer that has not yet proved that it knows the cluster's key are short, and have no payload.

Owns: framing and its limits. Does not know: sockets.
"""

import struct

import msgspec

from kvstore.protocol.calls import MAX_MESSAGE_BYTES
from messenger.wire.checksums import CHECKSUM_BYTES
from mooncake.errors import PoolError

MAX_GREETING_BYTES = 4096
"""The most bytes of a message from an unauthenticated peer."""
LONGEST_WAIT_S = 3600.0
"""The most seconds for which a call may ask to wait."""
MAX_KEYS = 4096
"""The most keys of one message."""
SMALL_BYTES = 64 * 1024
"""Size of the largest block that is received together with the bytes after it, and copied."""

_HEADER = struct.Struct("<IQ")
_AHEAD_BYTES = 16 * 1024
"""The most bytes that are received together with a header.

This is enough for small messages. At most this many bytes of a large payload have to be copied.
"""
_encoder = msgspec.msgpack.Encoder()


def max_keys(num_layers: int) -> int:
    """Return the most keys that one message may name if it also has `num_layers` checksums for each key."""
    return max(1, min(MAX_KEYS, MAX_MESSAGE_BYTES // 2 // (CHECKSUM_BYTES * max(1, num_layers))))


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes. Raises PoolError if it is too large."""
    encoded = _encoder.encode(message)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise PoolError(
            f"a {type(message).__name__} message takes {len(encoded)} bytes,"
            f" the limit is {MAX_MESSAGE_BYTES}; name fewer blocks at once"
        )
    return encoded


def encode_frame(message: msgspec.Struct, payload_bytes: int = 0) -> bytes:
    """Return a frame without its payload. Raises PoolError if the message is too large."""
    encoded = encode(message)
    return _HEADER.pack(len(encoded), payload_bytes) + encoded


class FrameBuffer:
    """A buffer of the received, unused bytes of a stream of frames.

    The caller receives into the buffer that a `room...` method returns, calls `received`, and takes each
    payload before the next message. Before `trust`, only greetings are accepted.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_HEADER.size + MAX_GREETING_BYTES + _AHEAD_BYTES))
        self._begin = 0
        self._end = 0
        self._is_trusted = False

    def trust(self) -> None:
        """Accept larger frames from now on, as the other side knows the cluster key."""
        held = self._buffer[self._begin : self._end]
        self._buffer = memoryview(bytearray(_HEADER.size + MAX_MESSAGE_BYTES + SMALL_BYTES))
        self._buffer[: len(held)] = held
        self._begin, self._end = 0, len(held)
        self._is_trusted = True

    def room_for_message(self) -> memoryview | None:
        """Return the memory for the rest of the next message; None when the message is complete.

        Raises PoolError for an invalid frame.
        """
        room = self.room_for(_HEADER.size, _AHEAD_BYTES)
        return room if room is not None else self.room_for(_HEADER.size + self._sizes()[0], _AHEAD_BYTES)

    def room_for(self, num_bytes: int, ahead_bytes: int) -> memoryview | None:
        """Return the memory to receive into until `num_bytes` bytes are held; None if they are held.

        The memory has room for `ahead_bytes` more.
        """
        missing = num_bytes - (self._end - self._begin)
        if missing <= 0:
            return None
        if self._begin + num_bytes + ahead_bytes > len(self._buffer) or self._begin == self._end:
            held = self._end - self._begin
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        return self._buffer[self._end : self._end + missing + ahead_bytes]

    def received(self, num_bytes: int) -> None:
        self._end += num_bytes

    def take_message(self) -> tuple[memoryview, int]:
        """Return the complete message, valid until more is received, and the number of its payload bytes."""
        num_bytes, payload_bytes = self._sizes()
        begin = self._begin + _HEADER.size
        self._begin = begin + num_bytes
        return self._buffer[begin : self._begin], payload_bytes

    def take_into(self, target: memoryview) -> int:
        """Move held bytes to the start of `target`. Returns their number."""
        num_bytes = min(len(target), self._end - self._begin)
        target[:num_bytes] = self._buffer[self._begin : self._begin + num_bytes]
        self._begin += num_bytes
        return num_bytes

    def _sizes(self) -> tuple[int, int]:
        num_bytes, payload_bytes = _HEADER.unpack_from(self._buffer, self._begin)
        limit = MAX_MESSAGE_BYTES if self._is_trusted else MAX_GREETING_BYTES
        if not 0 < num_bytes <= limit:
            raise PoolError(f"a frame announces a message of {num_bytes} bytes, the limit is {limit}")
        if payload_bytes and not self._is_trusted:
            raise PoolError(f"a greeting announces a payload of {payload_bytes} bytes; it must have none")
        return num_bytes, payload_bytes
