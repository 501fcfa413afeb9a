"""Framing and handshake without IO."""

import msgspec
import pytest

from messenger.wire.identity import Identity
from messenger.wire.messages import (
    Challenge,
    Close,
    Hello,
    Introduction,
    Message,
    Open,
    RefusalKind,
    Refused,
    Welcome,
    Write,
    WriteAck,
    WriteEntry,
    brief,
)
from messenger.wire.protocol import (
    EXPECTED,
    MAX_GREETING_BYTES,
    SPOKEN,
    Frame,
    FrameReader,
    Phase,
    Side,
    check_identity,
    common_version,
    encode_frame,
)
from mooncake.errors import MismatchError, TransferError
from mooncake.messages.blocks import KVLayout
from mooncake.security.proofs import NONCE_BYTES

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
IDENTITY = Identity("prefill-0", 3, "host", "fingerprint-a", LAYOUT)
HELLO = Hello(SPOKEN.newest, b"n" * NONCE_BYTES)
CHALLENGE = Challenge(b"n" * NONCE_BYTES, b"p" * 32)
INTRODUCTION = Introduction(b"p" * 32, IDENTITY, b"s" * 16, 0, 4096)
WRITE = Write(1, 99, [WriteEntry(7, 2, 0, 2, b"\1" * 16, 8192)])


def feed(reader: FrameReader, data: bytes, piece_bytes: int) -> list[Frame]:
    """What `reader` makes of `data` if it arrives in pieces. Payload is not looked at."""
    frames = []
    begin = end = 0
    while end < len(data):
        end += piece_bytes
        while (frame := reader.read(memoryview(data)[begin:end])) is not None:
            frames.append(frame)
            begin += frame.num_bytes + frame.payload_bytes
            end = max(begin, end)
    return frames


def stream_of(*messages: tuple[Message, bytes]) -> bytes:
    return b"".join(encode_frame(message, len(payload)) + payload for message, payload in messages)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 8, 9, 64, 10_000])
def test_frames_survive_any_split(piece_bytes: int) -> None:
    messages = [HELLO, INTRODUCTION, Open(1, 99, "ref"), WRITE, WRITE, Close(1, None)]
    payloads = [b"", b"", b"", b"p" * 5, b"", b""]
    data = stream_of(*zip(messages, payloads, strict=True))
    frames = feed(FrameReader(Side.RECEIVER), data, piece_bytes)
    assert [frame.message for frame in frames] == messages
    assert [frame.payload_bytes for frame in frames] == list(map(len, payloads))


def test_every_cut_of_a_stream_yields_exactly_the_frames_before_it() -> None:
    messages = [HELLO, INTRODUCTION, Open(1, 99, "ref"), Close(1, "why")]
    parts = [stream_of((message, b"")) for message in messages]
    data = b"".join(parts)
    for cut in range(len(data) + 1):
        ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
        assert len(feed(FrameReader(Side.RECEIVER), data[:cut], 10_000)) == sum(end <= cut for end in ends)


@pytest.mark.parametrize(
    ("side", "messages", "complaint"),
    [
        (Side.RECEIVER, [Open(1, 2, "ref")], "expected Hello, got Open"),
        (Side.RECEIVER, [HELLO, HELLO], "expected Introduction, got Hello"),
        (Side.RECEIVER, [HELLO, WRITE], "expected Introduction, got Write"),
        (
            Side.RECEIVER,
            [HELLO, INTRODUCTION, WriteAck()],
            "expected Open or Write or Close .*, got WriteAck",
        ),
        (Side.SENDER, [WriteAck()], "expected Challenge or Refused, got WriteAck"),
        (Side.SENDER, [CHALLENGE, WriteAck()], "expected Welcome or Refused, got WriteAck"),
        (Side.SENDER, [Refused("no"), HELLO], "expected nothing more, got Hello"),
    ],
)
def test_message_out_of_phase_is_refused(side: Side, messages: list[Message], complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        feed(FrameReader(side), stream_of(*((message, b"") for message in messages)), 10_000)


def test_every_reachable_phase_says_what_it_expects() -> None:
    assert {phase for side, phase in EXPECTED if side is Side.SENDER} == set(Phase)


def test_payload_belongs_to_writes_only() -> None:
    with pytest.raises(TransferError, match="Hello came with a payload of 4 bytes"):
        feed(FrameReader(Side.RECEIVER), stream_of((HELLO, b"1234")), 10_000)


@pytest.mark.parametrize("meta_bytes", [0, MAX_GREETING_BYTES + 1, 0x48545450])
def test_absurd_frame_length_is_refused_before_memory_is_taken(meta_bytes: int) -> None:
    with pytest.raises(TransferError, match="bytes of meta data"):
        feed(FrameReader(Side.RECEIVER), meta_bytes.to_bytes(4, "little") + bytes(4), 8)


def test_garbage_is_refused() -> None:
    with pytest.raises(TransferError, match="cannot be read"):
        feed(FrameReader(Side.RECEIVER), (3).to_bytes(4, "little") + bytes(4) + b"\xc1\xc1\xc1", 64)


def test_refusal_kinds_cross_the_wire() -> None:
    ack = WriteAck(RefusalKind.CORRUPT, "checksum")
    greeting = ((CHALLENGE, b""), (Welcome(IDENTITY), b""))
    frames = feed(FrameReader(Side.SENDER), stream_of(*greeting, (ack, b"")), 10)
    assert frames[2].message == ack


def test_who_has_been_welcomed_may_send_long_frames() -> None:
    entries = [WRITE.entries[0]] * 1000
    frames = stream_of((HELLO, b""), (INTRODUCTION, b""), (Write(1, 99, entries), b""))
    assert len(feed(FrameReader(Side.RECEIVER), frames, 10_000)) == 3


def test_the_version_before_is_spoken_and_the_next_one_may_come() -> None:
    ours, before, nonce = SPOKEN.newest, SPOKEN.oldest, b"n" * NONCE_BYTES
    assert common_version(Hello(before, nonce)) == before
    assert common_version(Hello(before, nonce, ours)) == ours
    assert common_version(Hello(ours, nonce, ours + 1)) == ours


@pytest.mark.parametrize(
    ("distance", "words"), [(-2, "upgrade the sender to"), (2, "upgrade the receiver to")]
)
def test_other_versions_are_refused_by_name(distance: int, words: str) -> None:
    oldest, newest = (version + distance for version in SPOKEN)
    with pytest.raises(MismatchError, match=f"ours is {SPOKEN}, theirs is {oldest} and {newest}; {words}"):
        common_version(Hello(oldest, b"n" * NONCE_BYTES, newest))


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (
            msgspec.structs.replace(IDENTITY, fingerprint="fingerprint-b"),
            "fingerprint differs: ours is fingerprint-a, theirs is fingerprint-b",
        ),
        (
            msgspec.structs.replace(IDENTITY, layout=msgspec.structs.replace(LAYOUT, block_size=32)),
            "layout differs: ours is .*block_size=16.* theirs is .*block_size=32",
        ),
    ],
)
def test_mismatch_names_both_values(theirs: Identity, what: str) -> None:
    with pytest.raises(MismatchError, match=what):
        check_identity(IDENTITY, theirs)


@pytest.mark.parametrize("layers", [range(2), range(1), range(1, 2)])
@pytest.mark.parametrize("heads", [range(LAYOUT.num_kv_heads), range(1), range(1, 3)])
def test_peer_with_another_split_of_the_cluster_is_accepted(layers: range, heads: range) -> None:
    other = msgspec.structs.replace(IDENTITY, instance="decode-7", incarnation=1, host_id="elsewhere")
    theirs = msgspec.structs.replace(other, layout=LAYOUT.of_layers(layers).of_heads(heads))
    check_identity(IDENTITY, theirs)
    check_identity(theirs, IDENTITY)


def test_texts_stay_short_whoever_adds_to_them() -> None:
    text = "x" * 5000
    for _ in range(10):
        text = brief(f"somebody said: {text}")
    assert len(text) == 1000
    assert brief("short") == "short"
    open_reader = FrameReader(Side.RECEIVER)
    with pytest.raises(TransferError, match="cannot be read"):
        feed(open_reader, stream_of((HELLO, b""), (INTRODUCTION, b""), (Close(1, "y" * 5000), b"")), 100_000)
