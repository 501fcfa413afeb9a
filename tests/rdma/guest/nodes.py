"""Helpers of the tests: a device with memory, two of them joined in this process, one in another process."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.memory import OPEN, WINDOW_BIND, RdmaMemory, register_range
from messenger.wire.rdma_info import EndpointInfo

MIB = 1 << 20


class Node:
    """A device of this machine and memory that is registered with it."""

    def __init__(self, device_name: str, size_bytes: int, *, is_open: bool = True) -> None:
        (device,), _reasons = find_devices([device_name])
        self.adapter = Adapter(device)
        self.buffer = memoryview(mmap.mmap(-1, size_bytes))
        self.bytes = np.frombuffer(self.buffer, np.uint8)
        self.memory = self._register_open() if is_open else self.adapter.register(self.buffer)

    def _register_open(self) -> RdmaMemory:
        """With a remote key that opens all of it to every peer: what nothing but a test does."""
        pin, rights = c_char.from_buffer(self.buffer), OPEN | (WINDOW_BIND if self.adapter.can_bind else 0)
        return register_range(self.adapter.domain, "the device", pin, len(self.buffer), rights)

    def close(self) -> None:
        self.memory.close()
        self.adapter.close()

    def endpoint(self, peer: str = "the other side") -> Endpoint:
        return Endpoint(self.adapter, self.memory, peer)

    def fill_randomly(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)

    def digest(self, offset: int, num_bytes: int) -> int:
        return xxhash.xxh3_64_intdigest(self.buffer[offset : offset + num_bytes])


def is_idle(endpoint: Endpoint) -> bool:
    """Whether no call is under way and nothing is open to the peer."""
    return not endpoint._waiting and not endpoint._chains and not endpoint.openings


@contextmanager
def node(device_name: str, size_bytes: int = MIB, *, is_open: bool = True) -> Iterator[Node]:
    made = Node(device_name, size_bytes, is_open=is_open)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def joined(here: Node, there: Node) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Two endpoints of this process, connected."""
    ours, theirs = here.endpoint(), there.endpoint()
    try:
        ours.connect(theirs.local_info())
        theirs.connect(ours.local_info())
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


@contextmanager
def two_nodes(
    size_bytes: int = MIB, *, is_open: bool = True
) -> Iterator[tuple[Node, Node, Endpoint, Endpoint]]:
    """rxe0 and rxe1 in this process, and an endpoint of each. The memory of rxe1 may be closed to peers."""
    with (
        node("rxe0", size_bytes) as here,
        node("rxe1", size_bytes, is_open=is_open) as there,
        joined(here, there) as ends,
    ):
        yield here, there, *ends


class Place(msgspec.Struct, frozen=True):
    """Where a peer's memory is."""

    info: EndpointInfo
    address: int
    remote_key: int


def scattered(address: int, num_slices: int, slice_bytes: int, seed: int) -> npt.NDArray[np.int64]:
    """Slices that carry the i-th piece here to another place there: a shuffled copy."""
    places = np.random.default_rng(seed).permutation(num_slices) * slice_bytes
    offsets = np.arange(num_slices) * slice_bytes
    return np.stack([offsets, address + places, np.full(num_slices, slice_bytes)], axis=1)
