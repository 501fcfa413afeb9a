"""The wire protocol between two messengers, without IO: framing, and the messages of each phase.

A frame is `meta length u32 | payload length u32` (little-endian), a msgpack message, then the payload. The
payload never passes through this module: it is received straight into pages.

Owns: framing, the messages of each phase. Does not know: their content (`messages`), sockets, pages.
"""

import struct
from enum import Enum, auto

import msgspec

from messenger.wire.identity import Identity
from messenger.wire.messages import (
    Abandon,
    Challenge,
    Close,
    Expose,
    Exposed,
    Fetch,
    FetchDone,
    Found,
    Hello,
    Introduction,
    Message,
    Open,
    Probe,
    Refused,
    TransferEnded,
    Welcome,
    Write,
    WriteAck,
)
from mooncake.errors import MismatchError, TransferError
from mooncake.versions import Versions

SPOKEN = Versions(6, 7)
"""The versions of this protocol that messengers speak (`mooncake.versions`)."""
MAX_META_BYTES = 1 << 20
"""The most bytes of a message. A write with `MAX_FRAME_ENTRIES` entries has only a fraction of them."""
MAX_GREETING_BYTES = 4096
"""The most bytes of a message from an unauthenticated peer."""
MAX_FRAME_ENTRIES = 1024
"""The most entries of one write, or keys of one fetch. A block may have several entries."""
MAX_FRAME_BYTES = 4 << 20
"""The most payload bytes of one frame, unless a single layer is larger.

This limits how long other frames wait behind a frame.
"""

NOT_URGENT_S = 0.002
"""Seconds for which a message may wait to leave together with a later message."""

SAME_TLS = "give security.tls_cert, tls_key and tls_ca to all nodes, signed by one authority, or to none"
"""The advice in errors when only one side speaks TLS."""

_HEADER = struct.Struct("<II")
_MOST_REASON_CHARS = 200
"""The most characters of a decoder's error that are reported, as the error may quote the frame."""
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""The first bytes of a TLS alert and of a TLS handshake.

Read as the length of a greeting, both are too large.
"""


class Side(Enum):
    """The two ends of a connection."""

    SENDER = auto()
    RECEIVER = auto()


class Phase(Enum):
    """The state of a connection, changed by the messages that arrive."""

    GREETING = auto()
    INTRODUCTION = auto()
    OPEN = auto()
    REFUSED = auto()


EXPECTED: dict[tuple[Side, Phase], tuple[type[Message], ...]] = {
    (Side.SENDER, Phase.GREETING): (Challenge, Refused),
    (Side.SENDER, Phase.INTRODUCTION): (Welcome, Refused),
    (Side.SENDER, Phase.OPEN): (WriteAck, TransferEnded, Found, Exposed),
    (Side.SENDER, Phase.REFUSED): (),
    (Side.RECEIVER, Phase.GREETING): (Hello,),
    (Side.RECEIVER, Phase.INTRODUCTION): (Introduction,),
    (Side.RECEIVER, Phase.OPEN): (Open, Write, Close, Fetch, FetchDone, Abandon, Expose, Probe),
}
NEXT_PHASE: dict[type[Message], Phase] = {
    Hello: Phase.INTRODUCTION,
    Challenge: Phase.INTRODUCTION,
    Introduction: Phase.OPEN,
    Welcome: Phase.OPEN,
    Refused: Phase.REFUSED,
}
WITH_PAYLOAD = (Write, Found, Probe)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message, payload_bytes: int = 0) -> bytes:
    """Return header and message of a frame; the caller then sends `payload_bytes` bytes of payload."""
    meta = _encoder.encode(message)
    assert len(meta) <= MAX_META_BYTES
    return _HEADER.pack(len(meta), payload_bytes) + meta


class Frame(msgspec.Struct, frozen=True):
    """A received message and the number of payload bytes that follow it on the stream."""

    message: Message
    payload_bytes: int
    num_bytes: int
    """The bytes of header and message together."""


class FrameReader:
    """The reader of frames at one side of a connection.

    The reader checks that a message may arrive in the present phase (`EXPECTED`).
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._phase = Phase.GREETING
        self._expected = EXPECTED[side, self._phase]
        self._most_meta_bytes = MAX_GREETING_BYTES
        self.wanted_bytes = _HEADER.size
        """The length of `data` that `read` needs to make progress."""

    def read(self, data: memoryview) -> Frame | None:
        """Return the frame at the beginning of `data`, without its payload.

        Returns None if `data` is too short; then `wanted_bytes` is the length that the next call needs.
        Raises TransferError if the peer does not speak this protocol.
        """
        if len(data) < _HEADER.size:
            self.wanted_bytes = _HEADER.size
            return None
        meta_bytes, payload_bytes = _HEADER.unpack_from(data)
        if not 0 < meta_bytes <= self._most_meta_bytes:
            if self._phase is Phase.GREETING and bytes(data[:2]) in _TLS_RECORDS:
                raise TransferError(f"the other side speaks TLS, this one does not; {SAME_TLS}")
            raise TransferError(
                f"a frame announces {meta_bytes} bytes of meta data, the limit is {self._most_meta_bytes}"
            )
        end = _HEADER.size + meta_bytes
        if len(data) < end:
            self.wanted_bytes = end
            return None
        try:
            message: Message = _decoder.decode(data[_HEADER.size : end])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransferError(f"a frame cannot be read: {str(error)[:_MOST_REASON_CHARS]}") from error
        kind = type(message)
        if kind not in self._expected:
            names = " or ".join(kind.__name__ for kind in self._expected)
            raise TransferError(f"expected {names or 'nothing more'}, got {kind.__name__}")
        if payload_bytes and kind not in WITH_PAYLOAD:
            raise TransferError(f"{kind.__name__} came with a payload of {payload_bytes} bytes")
        if kind in NEXT_PHASE:
            self._enter(NEXT_PHASE[kind])
        self.wanted_bytes = _HEADER.size
        return Frame(message, payload_bytes, end)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._expected = EXPECTED[self._side, phase]
        if phase is Phase.OPEN:
            self._most_meta_bytes = MAX_META_BYTES


def common_version(hello: Hello) -> int:
    """Return the newest version that both sides speak.

    Raises MismatchError, which names both sides' versions, if there is none.
    """
    theirs = Versions.named(hello.oldest_version, hello.newest_version)
    version = SPOKEN.common(theirs)
    if version is None:
        advice = SPOKEN.advice("the receiver", theirs, "the sender")
        raise MismatchError("messenger protocol version", SPOKEN, theirs, advice)
    return version


def check_identity(ours: Identity, theirs: Identity) -> None:
    """Check that two messengers may exchange bytes. Raises MismatchError, which names both sides' values."""
    if theirs.fingerprint != ours.fingerprint:
        raise MismatchError(
            "model fingerprint", ours.fingerprint, theirs.fingerprint, "serve the same checkpoint and dtype"
        )
    of_ours = theirs.layout.of_layers(ours.layout.layers).of_heads(ours.layout.heads)
    if of_ours != ours.layout:
        raise MismatchError("KV layout", ours.layout, theirs.layout, "use the same block size and dtype")
