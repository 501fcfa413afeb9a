"""Helper functions: a device with memory, two of them connected in this process, one in another process."""

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
    """A device of this machine, and memory that is registered with it."""

    def __init__(self, device_name: str, size_bytes: int, *, is_open: bool = True) -> None:
        (device,), _reasons = find_devices([device_name])
        self.adapter = Adapter(device)
        self.buffer = memoryview(mmap.mmap(-1, size_bytes))
        self.bytes = np.frombuffer(self.buffer, np.uint8)
        self.memory = self._register_open() if is_open else self.adapter.register(self.buffer)

    def _register_open(self) -> RdmaMemory:
        """Register the memory with a remote key that opens all of it to every peer. Only tests do this."""
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
    """Return whether no call is in progress and no memory is open to the peer."""
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
    """Make a context with two endpoints of this process that are connected."""
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
    """Make a context with rxe0 and rxe1 in this process, and a connected endpoint of each.

    With `is_open` the memory of rxe1 is open to peers.
    """
    with (
        node("rxe0", size_bytes) as here,
        node("rxe1", size_bytes, is_open=is_open) as there,
        joined(here, there) as ends,
    ):
        yield here, there, *ends


class Place(msgspec.Struct, frozen=True):
    """The address, size and key of a peer's memory."""

    info: EndpointInfo
    address: int
    remote_key: int


def scattered(address: int, num_slices: int, slice_bytes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return slices that send the pieces of this memory to shuffled places of the peer's memory."""
    places = np.random.default_rng(seed).permutation(num_slices) * slice_bytes
    offsets = np.arange(num_slices) * slice_bytes
    return np.stack([offsets, address + places, np.full(num_slices, slice_bytes)], axis=1)
