"""The wire protocol between two messengers, without IO.

One connection carries writes in one direction: the *sender* writes, the *receiver* acknowledges.

    sender                                receiver
    Hello                          ->                     who I am, what my bytes mean
                                   <-     Hello | Refused
    Open(transfer, grant)          ->                     from now on my loss is that grant's failure
    Write(transfer, entries)       ->                     over TCP the bytes follow the frame
                                   <-     WriteAck        one per Write, in their order
    Close(transfer, reason)        ->                     done, or given up
                                   <-     Ended           the receiver gave the transfer up

A frame is `meta length u32 | payload length u32` (little-endian), a msgpack message, then the payload.
The payload never passes through this module: it is received straight into pages.

Owns: messages, framing, what may be said in which phase. Does not know: sockets, pages, keys.
"""

import struct
from enum import Enum, auto

import msgspec

from messenger.identity import Identity
from mooncake.errors import MismatchError, TransferError

PROTOCOL_VERSION = 1
MAX_META_BYTES = 1 << 20
MAX_FRAME_ENTRIES = 1024
MAX_FRAME_BYTES = 4 << 20
"""Payload of one frame, unless a single layer is larger: bounds how long one frame holds the loop."""

_HEADER = struct.Struct("<II")


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First frame of either side. `segment_bytes` is set when the sender's segment comes along."""

    protocol_version: int
    identity: Identity
    segment_bytes: int | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The receiver will not talk to this sender."""

    message: str


class Open(msgspec.Struct, tag=True, frozen=True):
    """A transfer begins. `transfer_id` is the sender's, unique on its connection."""

    transfer_id: int
    grant_id: int
    ref_text: str


class WriteEntry(msgspec.Struct, frozen=True, array_like=True):
    """Layers `[layer_begin, layer_end)` of one remote page, contiguous on both sides.

    `checksums` holds one little-endian xxh3-64 per layer. `source_offset` is the byte offset in the
    sender's segment, from which the receiver copies when it maps that segment.
    """

    page: int
    generation: int
    layer_begin: int
    layer_end: int
    checksums: bytes
    source_offset: int

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_begin


class Write(msgspec.Struct, tag=True, frozen=True):
    """Place these bytes. Answered by exactly one `WriteAck`, whatever happens to the transfer."""

    transfer_id: int
    entries: list[WriteEntry]


class Close(msgspec.Struct, tag=True, frozen=True):
    """The sender is through with a transfer; `reason` says why if it gave up."""

    transfer_id: int
    reason: str | None


class RefusalKind(Enum):
    """Why a write was refused. After CORRUPT the sender must suspect its own copy."""

    STALE = "stale"
    CORRUPT = "corrupt"


class WriteAck(msgspec.Struct, tag=True, frozen=True):
    """The oldest unacknowledged write is placed and verified, or refused as a whole."""

    refusal: RefusalKind | None = None
    message: str = ""


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The receiver needs no more of this transfer: its grant is revoked or unknown."""

    transfer_id: int
    reason: str


Message = Hello | Refused | Open | Write | Close | WriteAck | Ended


class Side(Enum):
    """Which end of a connection we are."""

    SENDER = auto()
    RECEIVER = auto()


class Phase(Enum):
    """State of a connection, moved by the messages that arrive."""

    HANDSHAKE = auto()
    OPEN = auto()
    REFUSED = auto()


EXPECTED: dict[tuple[Side, Phase], tuple[type[Message], ...]] = {
    (Side.SENDER, Phase.HANDSHAKE): (Hello, Refused),
    (Side.SENDER, Phase.OPEN): (WriteAck, Ended),
    (Side.SENDER, Phase.REFUSED): (),
    (Side.RECEIVER, Phase.HANDSHAKE): (Hello,),
    (Side.RECEIVER, Phase.OPEN): (Open, Write, Close),
}
NEXT_PHASE: dict[type[Message], Phase] = {Hello: Phase.OPEN, Refused: Phase.REFUSED}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message, payload_bytes: int = 0) -> bytes:
    """Header and meta of a frame; `payload_bytes` of payload are to follow it."""
    meta = _encoder.encode(message)
    assert len(meta) <= MAX_META_BYTES
    return _HEADER.pack(len(meta), payload_bytes) + meta


class Frame(msgspec.Struct, frozen=True):
    """A received message and the number of payload bytes that follow it on the stream."""

    message: Message
    payload_bytes: int


class FrameReader:
    """Assembles frames from pieces of any size.

    The caller receives into `buffer()`, says how much with `received`, and after a frame with payload
    takes that payload off the stream itself before it asks again.
    """

    def __init__(self, side: Side) -> None:
        self.phase = Phase.HANDSHAKE
        self._side = side
        self._payload_bytes = 0
        self._in_header = True
        self._pending = memoryview(bytearray(_HEADER.size))
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never longer than what this frame still lacks."""
        return self._pending[self._filled :]

    def received(self, num_bytes: int) -> Frame | None:
        """`num_bytes` were placed into `buffer()`: the frame, when it is complete.

        Raises TransferError if the peer does not speak this protocol.
        """
        self._filled += num_bytes
        assert self._filled <= len(self._pending)
        if self._filled < len(self._pending):
            return None
        if self._in_header:
            meta_bytes, self._payload_bytes = _HEADER.unpack(self._pending)
            if not 0 < meta_bytes <= MAX_META_BYTES:
                raise TransferError(
                    f"a frame announces {meta_bytes} bytes of meta data, the limit is {MAX_META_BYTES}"
                )
            self._expect(meta_bytes, in_header=False)
            return None
        frame = Frame(self._decode(), self._payload_bytes)
        self._expect(_HEADER.size, in_header=True)
        return frame

    def _expect(self, num_bytes: int, *, in_header: bool) -> None:
        self._pending = memoryview(bytearray(num_bytes))
        self._filled = 0
        self._in_header = in_header

    def _decode(self) -> Message:
        try:
            message: Message = _decoder.decode(self._pending)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransferError(f"a frame cannot be read: {str(error)[:200]}") from error
        expected = EXPECTED[self._side, self.phase]
        if type(message) not in expected:
            names = " or ".join(kind.__name__ for kind in expected)
            raise TransferError(f"expected {names or 'nothing more'}, got {type(message).__name__}")
        if self._payload_bytes and not isinstance(message, Write):
            raise TransferError(
                f"{type(message).__name__} came with a payload of {self._payload_bytes} bytes"
            )
        self.phase = NEXT_PHASE.get(type(message), self.phase)
        return message


def check_hello(ours: Identity, theirs: Hello) -> None:
    """Raises MismatchError, naming both values, unless bytes may be exchanged."""
    if theirs.protocol_version != PROTOCOL_VERSION:
        raise MismatchError("messenger protocol version", PROTOCOL_VERSION, theirs.protocol_version)
    if theirs.identity.fingerprint != ours.fingerprint:
        raise MismatchError(
            "model fingerprint",
            ours.fingerprint,
            theirs.identity.fingerprint,
            "serve the same checkpoint and dtype",
        )
    if theirs.identity.layout != ours.layout:
        raise MismatchError(
            "KV layout", ours.layout, theirs.identity.layout, "use the same block size and dtype"
        )
