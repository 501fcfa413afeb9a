"""Frames and checksums, whatever pieces the bytes come in."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.frames import FrameBuffer, encode_frame, max_keys
from kvstore.messages import MAX_MESSAGE_BYTES, GotBlocks, Lookup, PutBlocks
from mooncake.errors import PoolError


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


@pytest.mark.parametrize("num_bytes", [0, MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_message_of_an_impossible_length_is_refused_before_it_is_received(num_bytes: int) -> None:
    buffer = FrameBuffer()
    header = struct.pack("<IQ", num_bytes, 0)
    room = buffer.room_for_message()
    assert room is not None
    room[: len(header)] = header
    buffer.received(len(header))
    with pytest.raises(PoolError, match=f"a message of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}"):
        buffer.room_for_message()


@pytest.mark.parametrize("num_layers", [1, 4, 80, 1000])
def test_as_many_keys_as_are_allowed_fit_into_a_message(num_layers: int) -> None:
    num_keys = max_keys(num_layers)
    assert num_keys >= 1
    keys, checksums = [bytes(16)] * num_keys, bytes(8 * num_layers * num_keys)
    encode_frame(PutBlocks(1 << 40, keys, checksums, 1e9))
    encode_frame(GotBlocks(1 << 40, [True] * num_keys, checksums))
