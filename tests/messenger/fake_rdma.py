"""Fake RDMA devices of this process. Their writes are copied when the test allows it.

As with real devices, a write outside of open memory breaks the queue pair for all its users, and a closed
queue pair transfers nothing any more. A cancelled call waits for its copies; if it is cancelled again, it
closes the queue pair.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, memmove
from dataclasses import dataclass, field
from typing import Any

import pytest

from messenger.rdma import cards, exposures
from messenger.rdma.cards import Cards
from messenger.rdma.devices import RdmaDevice
from messenger.rdma.errors import RdmaError
from messenger.rdma.memory import RdmaMemory
from messenger.rdma.windows import Access, OpenRanges
from messenger.transport.exposures import Range
from messenger.transport.transports import Remedy
from messenger.wire.rdma_info import EndpointInfo, LinkLayer


def device(name: str, gid: str = "::ffff:10.0.0.1", network: str | None = None, port: int = 1) -> RdmaDevice:
    return RdmaDevice(name, port, 4096, LinkLayer.ETHERNET, 0, gid, 1, 1 << 30, network)


class FakeAdapter:
    def __init__(self, network: "FakeNetwork", its_device: RdmaDevice) -> None:
        self.network = network
        self.device = its_device

    def register(self, buffer: memoryview) -> RdmaMemory:
        pin = c_char.from_buffer(buffer)
        return RdmaMemory(addressof(pin), len(buffer), 1, 0, None, pin)


@dataclass(eq=False)
class FakeNetwork:
    """All fake queue pairs. `fault` returns how each write of real bytes fails; None if it succeeds."""

    endpoints: dict[int, "FakeEndpoint"] = field(default_factory=dict)
    may_land: bool = True
    fault: Callable[["FakeEndpoint"], Remedy | None] = lambda _endpoint: None
    connect_fault: Callable[["FakeEndpoint"], Remedy | None] = lambda _endpoint: None
    """A function like `fault` for the bytes by which a new path is tried."""
    num_landed: int = 0
    num_made: int = 0
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def cards(self, *devices: RdmaDevice) -> Cards:
        return Cards([FakeAdapter(self, each) for each in devices])  # type: ignore[misc]

    @property
    def num_writing(self) -> int:
        return sum(endpoint.num_writing for endpoint in self.endpoints.values())


class FakeEndpoint:
    def __init__(self, adapter: FakeAdapter, memory: RdmaMemory, peer: str) -> None:
        self.adapter = adapter
        self.peer = peer
        self.failure: RdmaError | None = None
        self.openings: dict[int, tuple[int, int]] = {}
        """The first and the end address that each key opens."""
        self.num_writing = 0
        self._memory = memory
        self._network = adapter.network
        self._network.num_made += 1
        self._number = next(self._network.numbers)
        self._network.endpoints[self._number] = self
        self._other: FakeEndpoint | None = None

    def local_info(self) -> EndpointInfo:
        its = self.adapter.device
        return EndpointInfo(self._number, 0, its.gid, 0, its.link_layer, 4096, 1 << 30, 16)

    def connect(self, remote: EndpointInfo) -> None:
        self._other = self._network.endpoints[remote.qp_num]

    async def write(
        self, slices: Sequence[tuple[int, int, int]], keys: Any, *, memory: RdmaMemory | None = None
    ) -> None:
        self.check_usable()
        shared_segment = asyncio.create_task(self._land(slices, keys, memory or self._memory))
        self.num_writing += 1
        try:
            await asyncio.shield(shared_segment)
        except asyncio.CancelledError:
            try:
                await asyncio.wait([shared_segment])
            except asyncio.CancelledError:
                self.close()
                await asyncio.wait([shared_segment])
            shared_segment.exception()
            raise
        finally:
            self.num_writing -= 1

    async def _land(self, slices: Sequence[tuple[int, int, int]], keys: Any, memory: RdmaMemory) -> None:
        is_real, network = memory is self._memory, self._network
        while is_real and not network.may_land and self.failure is None:
            await asyncio.sleep(0.001)
        remedy = (network.fault if is_real else network.connect_fault)(self)
        self.check_usable()
        if remedy is not None:
            raise self._fail(RdmaError("a fault of the test", remedy))
        all_keys = [keys] * len(slices) if isinstance(keys, int) else keys
        for (offset, address, num_bytes), key in zip(slices, all_keys, strict=True):
            assert self._other is not None
            begin, end = self._other.openings.get(key, (0, 0))
            if not begin <= address <= address + num_bytes <= end:
                raise self._fail(RdmaError("the peer refused access", Remedy.GIVE_UP))
            memmove(address, memory.address + offset, num_bytes)
            network.num_landed += is_real

    async def read(self, slices: Sequence[tuple[int, int, int]], keys: Sequence[int]) -> None:
        self.check_usable()
        await asyncio.sleep(0)
        for (offset, address, num_bytes), key in zip(slices, keys, strict=True):
            assert self._other is not None
            begin, end = self._other.openings.get(key, (0, 0))
            if not begin <= address <= address + num_bytes <= end:
                raise self._fail(RdmaError("the peer refused access", Remedy.GIVE_UP))
            memmove(self._memory.address + offset, address, num_bytes)

    def check_usable(self) -> None:
        """Raise an error if the queue pair has failed.

        Only the call that caused the failure is to be given up.
        """
        if self.failure is not None:
            is_refusal = self.failure.remedy is Remedy.GIVE_UP
            raise RdmaError(str(self.failure), Remedy.RETRY if is_refusal else self.failure.remedy)

    def _fail(self, error: RdmaError) -> RdmaError:
        self.failure = self.failure or error
        self.openings.clear()
        self._network.endpoints.pop(self._number, None)
        return error

    def close(self) -> None:
        self._fail(RdmaError("closed", Remedy.RETRY))


async def _open_windows(
    endpoint: FakeEndpoint, memory: RdmaMemory, ranges: Sequence[Range], access: Access = Access.WRITE
) -> OpenRanges:
    keys = [next(endpoint.adapter.network.numbers) for _ in ranges]
    for key, (offset, num_bytes) in zip(keys, ranges, strict=True):
        endpoint.openings[key] = memory.address + offset, memory.address + offset + num_bytes
    return OpenRanges(keys, [])


def _close_windows(endpoint: FakeEndpoint, granted: OpenRanges) -> None:
    for key in granted.remote_keys:
        endpoint.openings.pop(key, None)


def install(patch: pytest.MonkeyPatch) -> FakeNetwork:
    """Replace queue pairs by fake ones for the rest of the test, and return their network."""
    patch.setattr(cards, "Endpoint", FakeEndpoint)
    for module in (cards, exposures):
        patch.setattr(module, "open_windows", _open_windows)
    patch.setattr(exposures, "close_windows", _close_windows)
    return FakeNetwork()
