"""The compiled code and the library must agree on every byte: checksums are kept, and written by either."""

import random
import socket
from ctypes import c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest
import xxhash

from messenger.wire import checksums
from messenger.wire.checksums import LayerChecksums, address_of, copy_layers, copy_scattered, layer_checksums
from mooncake.native import NativeCodeError, NoCompilerError, load

LAYER_SIZES = [1, 240, 241, 304, 1024, 1025, 24 * 1024, 65537, 300_000]


def expected(block: bytes, layer_bytes: int) -> bytes:
    starts = range(0, len(block), layer_bytes)
    digests = [xxhash.xxh3_64_intdigest(block[start : start + layer_bytes]) for start in starts]
    return np.asarray(digests, "<u8").tobytes()


def blocks(layer_bytes: int) -> list[bytes]:
    """Small and large enough for the compiled code, with and without streaming stores."""
    counts = {1, 3, 80_000 // layer_bytes + 1, 600_000 // layer_bytes + 1}
    return [
        random.randbytes(layer_bytes * count) for count in sorted(counts) if layer_bytes > 200 or count < 4
    ]


@pytest.fixture(params=["compiled", "library"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute."""
    if request.param == "library":
        monkeypatch.setattr(checksums, "_native", lambda: None)
    else:
        assert checksums._native() is not None, "these tests need a C++ compiler"
    return str(request.param)


@pytest.mark.parametrize("layer_bytes", LAYER_SIZES)
def test_checksums_are_the_xxh3_of_each_layer(implementation: str, layer_bytes: int) -> None:
    for block in blocks(layer_bytes):
        assert layer_checksums(memoryview(block), layer_bytes) == expected(block, layer_bytes)


@pytest.mark.parametrize("layer_bytes", LAYER_SIZES)
def test_a_copy_is_exact_at_any_address_and_touches_nothing_else(
    implementation: str, layer_bytes: int
) -> None:
    for block in blocks(layer_bytes):
        for offset in (0, 1, 33, 63, 64):
            target = memoryview(bytearray(b"\xee" * (len(block) + 200)))
            place = target[offset : offset + len(block)]
            assert copy_layers(memoryview(block), place, layer_bytes) == expected(block, layer_bytes)
            assert place == block
            assert set(target[:offset]) | set(target[offset + len(block) :]) == {0xEE}


@pytest.mark.parametrize("offset", [0, 1, 16, 32, 63])
@pytest.mark.parametrize("layer_bytes", [5000, 64 * 1024])
def test_a_streaming_copy_writes_all_lines_but_its_ends_around_the_caches(
    offset: int, layer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lines written plainly between streamed ones made copies to most arrays (at 16) up to 4 times slower.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counting = load(Path(__file__).with_name("streaming.cpp"))
    if not counting.can_stream():
        pytest.skip("this processor has no streaming stores that are used")
    counting.plain_bytes.restype = c_size_t
    counting.plain_bytes.argtypes = (c_void_p, c_void_p, c_size_t, c_size_t)
    num_layers = 16
    block = np.frombuffer(random.randbytes(num_layers * layer_bytes), np.uint8)
    memory = np.zeros(len(block) + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    place = memory[start : start + len(block)]
    num_plain = counting.plain_bytes(place.ctypes.data, block.ctypes.data, layer_bytes, num_layers)
    assert np.array_equal(place, block)
    assert num_plain == -offset % 64 + (offset + len(block)) % 64


@pytest.mark.parametrize("layer_bytes", [1, 240, 241, 1025, 24 * 1024])
def test_layers_are_copied_from_anywhere_to_anywhere(implementation: str, layer_bytes: int) -> None:
    stride, from_, to = layer_bytes + 7, [3, 0, 2], [1, 4, 0]
    source, target = memoryview(bytearray(random.randbytes(4 * stride))), memoryview(bytearray(5 * stride))
    addresses = [
        address_of(memory) + np.array(places, np.int64) * stride
        for memory, places in ((source, from_), (target, to))
    ]
    digests = copy_scattered(addresses[0], addresses[1], layer_bytes)
    layers = [bytes(source[place * stride : place * stride + layer_bytes]) for place in from_]
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(layer) for layer in layers]
    wanted = bytearray(5 * stride)
    for place, layer in zip(to, layers, strict=True):
        wanted[place * stride : place * stride + layer_bytes] = layer
    assert target == wanted


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("layer_bytes", [241, 1024, 1025, 5000, 150_000])
def test_pieces_of_any_size_give_the_same_checksums(
    layer_bytes: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(checksums, "_native", lambda: None)
    chance = random.Random(1)
    block = random.randbytes(4 * layer_bytes)
    for _ in range(20):
        ends = sorted({chance.randrange(1, len(block)) for _ in range(8)} | {len(block)})
        pieces = LayerChecksums(memoryview(block), layer_bytes)
        for end in ends:
            pieces.advance(end)
        assert pieces.packed() == expected(block, layer_bytes)


@pytest.mark.parametrize("layer_bytes", [1024, 5000, 300_000])
def test_a_block_is_received_and_hashed_in_one_go(layer_bytes: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        data = random.randbytes(4 * layer_bytes)
        block = memoryview(bytearray(len(data)))
        arriving = LayerChecksums(block, layer_bytes)
        assert arriving.can_receive
        sent, num_bytes = 0, 0
        with pytest.raises(BlockingIOError):
            arriving.receive(far.fileno(), len(block))
        block[:7] = data[:7]
        arriving.advance(7)
        sent = num_bytes = 7
        while num_bytes < len(block):
            sent += near.send(data[sent : sent + 50_001])
            wanted = min(sent, len(block))
            num_bytes += arriving.receive(far.fileno(), wanted)
            assert arriving.num_there == num_bytes == wanted
        assert block == data
        assert arriving.packed() == expected(data, layer_bytes)


def test_receiving_says_how_the_stream_ended() -> None:
    near, far = socket.socketpair()
    block = memoryview(bytearray(4096))
    with far:
        near.send(b"123")
        near.close()
        arriving = LayerChecksums(block, 1024)
        assert arriving.receive(far.fileno(), 4096) == 3, "what came before the end is there"
        with pytest.raises(ConnectionResetError, match="closed by the peer"):
            arriving.receive(far.fileno(), 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        arriving.receive(far.fileno(), 4096)


def test_code_is_compiled_once_and_an_error_in_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    assert load(source).seven() == 7
    [library] = (tmp_path / "cache").rglob("*.so")
    compiled_ns = library.stat().st_mtime_ns
    load.cache_clear()
    assert load(source).seven() == 7
    assert library.stat().st_mtime_ns == compiled_ns
    source.write_text("extern int seven( {")
    load.cache_clear()
    with pytest.raises(NativeCodeError, match=r"(?s)cannot compile .*seven\.cpp.*error"):
        load(source)
    assert len(list((tmp_path / "cache").rglob("*"))) == 3, "nothing unfinished is left behind"


def test_without_a_compiler_blocks_are_copied_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler is not installed"):
        load(tmp_path / "any.cpp")
    load.cache_clear()
    checksums._native.cache_clear()
    block = random.randbytes(4 * 40_000)
    assert layer_checksums(memoryview(block), 40_000) == expected(block, 40_000)
    assert "more slowly: no C++ compiler" in caplog.text
    checksums._native.cache_clear()
