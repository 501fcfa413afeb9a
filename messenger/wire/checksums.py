"""Checksums of KVCache bytes: one xxh3-64 for each layer of a block, little-endian, alone or while copying.

Compiled code (checksums.cpp) copies and hashes larger blocks while reading memory once. Without a compiler,
numpy and xxhash do the same at about two thirds of the speed.

Owns: how checksums are computed. Does not know: the owner of bytes, where checksums are kept.
"""

import functools
import os
from array import array
from ctypes import CDLL, addressof, byref, c_char, c_int, c_int64, c_size_t, c_ssize_t, c_void_p, memmove
from typing import Any

import numpy as np
import xxhash

from messenger.native import SOURCES
from mooncake.native import load_or_do_without

Addresses = np.ndarray[Any, np.dtype[np.int64]]
Digests = np.ndarray[Any, np.dtype[np.uint64]]

CHECKSUM_BYTES = 8
PIECE_BYTES = 256 * 1024
"""Bytes that are copied at a time, and hashed while still in the processor's cache."""
_FEW_BYTES = 64 * 1024
"""The number of bytes up to which neither a compiled call nor hashing in pieces pays off."""
_STREAMED_BYTES = 512 * 1024
"""A copy of this many bytes or more bypasses the caches."""
_SPIN_NS = 200_000
"""Nanoseconds for which a call waits for more of a block before other tasks run."""
SHORT_LAYER_BYTES = 240
"""Bytes of a layer up to which xxh3 uses another algorithm. The xxhash library hashes such layers."""


def prepare() -> None:
    """Compile the code, so that no request waits for the compiler."""
    _native()


def layer_checksums(layers: memoryview, layer_bytes: int) -> bytes:
    """Return the little-endian xxh3-64 of each of the consecutive `layers`, concatenated in order.

    A layer has `layer_bytes` bytes.
    """
    assert len(layers) % layer_bytes == 0
    native = _native() if len(layers) > _FEW_BYTES and layer_bytes > SHORT_LAYER_BYTES else None
    if native is None:
        starts = range(0, len(layers), layer_bytes)
        each = [xxhash.xxh3_64_intdigest(layers[start : start + layer_bytes]) for start in starts]
        return b"".join([digest.to_bytes(CHECKSUM_BYTES, "little") for digest in each])
    digests = np.empty(len(layers) // layer_bytes, "<u8")
    native.hash_layers(address_of(layers), layer_bytes, len(digests), digests.ctypes.data)
    return digests.tobytes()


def copy_layers(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
    """Copy whole layers, and return their checksums as `layer_checksums` does.

    Other threads run meanwhile if the block is large.
    """
    assert len(source) == len(target)
    assert len(target) % layer_bytes == 0
    assert not target.readonly
    if len(target) <= _FEW_BYTES:
        target[:] = source
        return layer_checksums(target, layer_bytes)
    native = _native() if layer_bytes > SHORT_LAYER_BYTES else None
    if native is None:
        return _copy_in_pieces(source, target, layer_bytes)
    digests = np.empty(len(target) // layer_bytes, "<u8")
    native.copy_layers(
        address_of(target),
        address_of(source),
        layer_bytes,
        len(digests),
        digests.ctypes.data,
        len(target) >= _STREAMED_BYTES,
    )
    return digests.tobytes()


def copy_scattered(sources: Addresses, targets: Addresses, layer_bytes: int) -> Digests:
    """Copy n layers, each from its address in `sources` to its address in `targets`.

    Both are int64 `[n]`; the caller keeps the memory mapped. Returns the xxh3-64 of each layer, uint64 `[n]`.
    With compiled code, other threads run meanwhile: all copies are one call.
    """
    digests = np.empty(len(sources), np.uint64)
    native = _native() if layer_bytes > SHORT_LAYER_BYTES else None
    if native is None:
        for index, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            memmove(target, source, layer_bytes)
            digests[index] = xxhash.xxh3_64_intdigest((c_char * layer_bytes).from_address(target))
    else:
        assert sources.flags.c_contiguous
        assert targets.flags.c_contiguous
        native.copy_scattered(
            targets.ctypes.data, sources.ctypes.data, layer_bytes, len(sources), digests.ctypes.data
        )
    return digests


class LayerChecksums:
    """The computation of the xxh3-64 of each layer of `block`.

    The block's bytes arrive in order, in pieces of any size. They are hashed when they arrive, while they are
    in the processor's cache.
    """

    def __init__(self, block: memoryview, layer_bytes: int) -> None:
        self.block = block
        self._layer_bytes = layer_bytes
        self.num_there = 0
        self._num_hashed = c_size_t(0)
        self._digests = array("Q", bytes(len(block) // layer_bytes * CHECKSUM_BYTES))
        self._native = _native() if layer_bytes > SHORT_LAYER_BYTES else None
        self._address = address_of(block) if self._native is not None else 0
        self._state = array("Q", bytes(64))
        """State of the compiled hash of a layer that has begun."""
        self._begun: xxhash.xxh3_64 | None = None
        """The xxhash library's hash of a layer that has begun; used without compiled code."""

    def advance(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` bytes of the block have arrived, and hash arrived bytes.

        Without compiled code, a few bytes of an incomplete layer are hashed later.
        """
        self.num_there = num_bytes
        if self._native is None:
            self._num_hashed.value = self._hash_arrived(num_bytes, self._num_hashed.value)
        else:
            self._num_hashed.value = self._native.hash_arrived(
                self._address,
                self._layer_bytes,
                self._num_hashed.value,
                num_bytes,
                self._state.buffer_info()[0],
                self._digests.buffer_info()[0],
            )

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the block have arrived."""
        return self.num_there == len(self.block)

    @property
    def can_receive(self) -> bool:
        """Whether `receive` can be used: it needs compiled code."""
        return self._native is not None

    def receive(self, fd: int, num_wanted: int) -> int:
        """Receive from a stream socket until the first `num_wanted` bytes of the block have arrived.

        The call ends earlier if no more bytes arrive for a moment, or if the block is complete. Returns the
        number of received bytes. Raises OSError if no byte was received: BlockingIOError if none was there,
        ConnectionError if the connection has ended.
        """
        assert self._native is not None
        num_there: int = self._native.receive_layers(
            fd,
            self._address,
            self._layer_bytes,
            self.num_there,
            min(num_wanted, len(self.block)),
            _SPIN_NS,
            byref(self._num_hashed),
            self._state.buffer_info()[0],
            self._digests.buffer_info()[0],
        )
        if num_there == 0:
            raise ConnectionResetError("connection closed by the peer")
        if num_there < 0:
            raise OSError(-num_there, os.strerror(-num_there))
        num_bytes = num_there - self.num_there
        self.num_there = num_there
        return num_bytes

    def _hash_arrived(self, num_bytes: int, num_hashed: int) -> int:
        """Hash arrived bytes as the compiled code does, and return the number of hashed bytes."""
        while (layer_end := (num_hashed // self._layer_bytes + 1) * self._layer_bytes) <= num_bytes:
            rest = self.block[num_hashed:layer_end]
            if self._begun is None:
                digest = xxhash.xxh3_64_intdigest(rest)
            else:
                self._begun.update(rest)
                digest = self._begun.intdigest()
                self._begun = None
            self._digests[layer_end // self._layer_bytes - 1] = digest
            num_hashed = layer_end
        if num_bytes - num_hashed >= _FEW_BYTES:
            self._begun = self._begun or xxhash.xxh3_64()
            self._begun.update(self.block[num_hashed:num_bytes])
            num_hashed = num_bytes
        return num_hashed

    def packed(self) -> bytes:
        """Return the little-endian checksums of all complete layers, in order, 8 bytes each."""
        return self._digests[: self._num_hashed.value // self._layer_bytes].tobytes()


def _copy_in_pieces(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
    checksums = LayerChecksums(target, layer_bytes)
    from_bytes, to_bytes = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for start in range(0, len(target), PIECE_BYTES):
        end = min(start + PIECE_BYTES, len(target))
        np.copyto(to_bytes[start:end], from_bytes[start:end])
        checksums.advance(end)
    return checksums.packed()


@functools.cache
def _native() -> CDLL | None:
    library = load_or_do_without(SOURCES / "checksums.cpp", "blocks are copied and checked more slowly")
    if library is None:
        return None
    library.hash_layers.argtypes = (c_void_p, c_size_t, c_size_t, c_void_p)
    library.copy_layers.argtypes = (c_void_p, c_void_p, c_size_t, c_size_t, c_void_p, c_int)
    library.copy_scattered.argtypes = (c_void_p, c_void_p, c_size_t, c_size_t, c_void_p)
    library.hash_arrived.argtypes = (c_void_p, c_size_t, c_size_t, c_size_t, c_void_p, c_void_p)
    library.receive_layers.argtypes = (
        c_int,
        c_void_p,
        c_size_t,
        c_size_t,
        c_size_t,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
    )
    library.receive_layers.restype = c_ssize_t
    library.hash_layers.restype = library.copy_layers.restype = library.copy_scattered.restype = None
    library.hash_arrived.restype = c_size_t
    return library


def address_of(view: memoryview) -> int:
    """Return the address of the bytes of `view`."""
    if not view.readonly:
        return addressof(c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
