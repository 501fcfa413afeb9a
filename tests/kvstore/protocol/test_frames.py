"""Frames and checksums, whatever pieces the bytes come in."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.answers import GotBlocks
from kvstore.protocol.calls import MAX_MESSAGE_BYTES, Lookup, PutBlocks
from kvstore.protocol.frames import MAX_GREETING_BYTES, FrameBuffer, encode_frame, max_keys
from mooncake.errors import PoolError
from mooncake.security.greeting import Greeting


@given(
    frames=st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=200)), max_size=8),
    pieces=st.lists(st.integers(1, 90), min_size=1),
)
def test_frames_are_found_in_any_pieces(frames: list[tuple[int, bytes]], pieces: list[int]) -> None:
    stream = b"".join(
        encode_frame(Lookup(call_id, [bytes(16)] * call_id), len(payload)) + payload
        for call_id, payload in frames
    )
    buffer, position, num_pieces = FrameBuffer(), 0, 0
    buffer.trust()

    def receive(room: memoryview) -> int:
        nonlocal position, num_pieces
        piece = stream[position : position + min(len(room), pieces[num_pieces % len(pieces)])]
        assert piece, "more is wanted than was sent"
        room[: len(piece)] = piece
        position, num_pieces = position + len(piece), num_pieces + 1
        return len(piece)

    for call_id, payload in frames:
        while (room := buffer.room_for_message()) is not None:
            buffer.received(receive(room))
        encoded, payload_bytes = buffer.take_message()
        lookup = msgspec.msgpack.decode(encoded, type=Lookup)
        assert (lookup.call_id, len(lookup.keys), payload_bytes) == (call_id, call_id, len(payload))
        target = memoryview(bytearray(payload_bytes))
        filled = buffer.take_into(target)
        while filled < payload_bytes:
            filled += receive(target[filled:])
        assert target == payload
    assert buffer.take_into(memoryview(bytearray(1))) == 0


def receive_header(buffer: FrameBuffer, num_bytes: int, payload_bytes: int = 0) -> None:
    header = struct.pack("<IQ", num_bytes, payload_bytes)
    room = buffer.room_for_message()
    assert room is not None
    room[: len(header)] = header
    buffer.received(len(header))


@pytest.mark.parametrize("num_bytes", [0, MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_message_of_an_impossible_length_is_refused_before_it_is_received(num_bytes: int) -> None:
    buffer = FrameBuffer()
    buffer.trust()
    receive_header(buffer, num_bytes)
    with pytest.raises(PoolError, match=f"a message of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}"):
        buffer.room_for_message()


@pytest.mark.parametrize("num_bytes", [0, MAX_GREETING_BYTES + 1, MAX_MESSAGE_BYTES])
def test_long_message_of_a_stranger_is_refused_before_it_is_received(num_bytes: int) -> None:
    buffer = FrameBuffer()
    receive_header(buffer, num_bytes)
    with pytest.raises(PoolError, match=f"a message of {num_bytes} bytes, the limit is {MAX_GREETING_BYTES}"):
        buffer.room_for_message()


def test_payload_of_a_stranger_is_refused_before_it_is_received() -> None:
    buffer = FrameBuffer()
    receive_header(buffer, 10, payload_bytes=1)
    with pytest.raises(PoolError, match="a greeting announces a payload of 1 bytes; it must have none"):
        buffer.room_for_message()


def test_what_came_with_the_last_greeting_is_kept_when_the_other_side_is_trusted() -> None:
    greeting, first = encode_frame(Greeting(bytes(32))), encode_frame(Lookup(1, [bytes(16)]), 3) + b"xyz"
    buffer = FrameBuffer()
    room = buffer.room_for_message()
    assert room is not None
    room[: len(greeting + first)] = greeting + first
    buffer.received(len(greeting + first))
    assert buffer.room_for_message() is None
    assert buffer.take_message() == (greeting[12:], 0)
    buffer.trust()
    assert buffer.room_for_message() is None
    assert buffer.take_message() == (first[12:-3], 3)
    payload = memoryview(bytearray(3))
    assert buffer.take_into(payload) == 3
    assert payload == b"xyz"


@pytest.mark.parametrize("num_layers", [1, 4, 80, 1000])
def test_as_many_keys_as_are_allowed_fit_into_a_message(num_layers: int) -> None:
    num_keys = max_keys(num_layers)
    assert num_keys >= 1
    keys, checksums = [bytes(16)] * num_keys, bytes(8 * num_layers * num_keys)
    encode_frame(PutBlocks(1 << 40, keys, checksums, 1e9))
    encode_frame(GotBlocks(1 << 40, [True] * num_keys, checksums))
