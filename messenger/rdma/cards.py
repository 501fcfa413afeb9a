"""The RDMA devices that a messenger uses, with its segment registered on each of them.

Devices are opened when the process starts, so that a demanded device that is missing is noticed then. The
segment is registered later, when its memory does not move any more.

Owns: opening and choosing devices. Does not know: peers, transfers.
"""

import asyncio
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.memory import RdmaMemory
from messenger.rdma.topology import Topology
from messenger.rdma.windows import open_windows
from messenger.transport.exposures import Range
from messenger.wire.rdma_info import EndpointInfo, Scratch
from mooncake.config.sections import MessengerConfig
from mooncake.errors import ConfigError, TransferError

SCRATCH_BYTES: Final = 1 << 20
_SEGMENT_LOCATION = "cpu:0"
_TRIED_BYTES: Final = 64 << 10
"""Bytes with which a path is tried, in full packets.

Small packets may pass where large packets are lost.
"""
_REGISTERED_WITHIN_S = 2.0
"""Seconds for which a connection waits for the registration of the segment."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """A device with the registered segment and with scratch memory.

    Peers get access to single ranges of the segment only.
    """

    adapter: Adapter
    memory: RdmaMemory
    scratch: RdmaMemory

    @classmethod
    def of(cls, adapter: Adapter, segment: memoryview) -> "Card":
        """Register the segment and scratch memory with a device, and return the card.

        No other Python thread runs meanwhile, as pyverbs holds the GIL. Raises RdmaUnavailableError.
        """
        scratch = adapter.register(memoryview(mmap.mmap(-1, SCRATCH_BYTES)))
        return cls(adapter, adapter.register(segment), scratch)

    def endpoint(self, peer: str) -> Endpoint:
        """Return a queue pair that is not connected yet. Raises RdmaUnavailableError."""
        return Endpoint(self.adapter, self.memory, peer)

    async def open_scratch(self, endpoint: Endpoint) -> Scratch:
        """Open scratch memory to the peer of a connected endpoint, until the endpoint closes.

        Returns the memory's address and key. Raises RdmaError.
        """
        opened = await open_windows(endpoint, self.scratch, [Range(0, self.scratch.size_bytes)])
        return Scratch(self.scratch.address, opened.remote_keys[0], self.scratch.size_bytes)

    async def write_scratch(self, endpoint: Endpoint, theirs: Scratch, num_bytes: int = _TRIED_BYTES) -> None:
        """Write to the peer's scratch memory, as a trial of the path. Raises RdmaError."""
        piece_bytes = max(1, min(num_bytes, theirs.num_bytes, self.scratch.size_bytes))
        slices = [(0, theirs.address, piece_bytes)] * (num_bytes // piece_bytes)
        await endpoint.write(slices, theirs.remote_key, memory=self.scratch)


class Cards:
    """The RDMA devices that were opened, by name; empty if RDMA is not used."""

    def __init__(self, adapters: Sequence[Adapter], *, is_demanded: bool = False) -> None:
        self._adapters = {str(adapter.device): adapter for adapter in adapters}
        """Adapters by device and port."""
        self._is_demanded = is_demanded
        self._cards: dict[str, Card] = {}
        self._registered = asyncio.Event()
        self._num_answered = 0

    @property
    def names(self) -> list[str]:
        """The name (device and port) of each card."""
        return list(self._adapters)

    async def register(self, segment: memoryview) -> None:
        """Register the segment with all devices, until the process ends.

        A device that fails to register the segment is not used. Raises ConfigError if RDMA is demanded and
        all devices fail.
        """
        loop, reasons = asyncio.get_running_loop(), []
        for name, adapter in list(self._adapters.items()):
            try:
                self._cards[name] = await loop.run_in_executor(None, Card.of, adapter, segment)
            except RdmaUnavailableError as error:
                log.error("%s is not used: %s", name, error)
                reasons.append(str(error))
                del self._adapters[name]
        self._registered.set()
        if reasons and not self._cards and self._is_demanded:
            raise ConfigError(f"messenger.transport: rdma, but {'; '.join(reasons)}")

    async def card(self, name: str) -> Card:
        """Return the card of this name. Raises TransferError if the segment is not registered with it."""
        await self._until_registered()
        if name not in self._cards:
            raise TransferError(f"RDMA device {name} is not in use here")
        return self._cards[name]

    async def answering(self, remote: EndpointInfo) -> Card:
        """Return a card for a peer's queue pair. Raises TransferError.

        Cards on the peer's network are taken in turn, or all cards in turn if no card is on this network.
        """
        await self._until_registered()
        cards = list(self._cards.values())
        if not cards:
            raise TransferError("there is no RDMA device in use here")
        near = [card for card in cards if card.adapter.device.is_on_network_of(remote.gid)] or cards
        self._num_answered += 1
        return near[self._num_answered % len(near)]

    async def _until_registered(self) -> None:
        if not self._adapters:
            return
        try:
            async with asyncio.timeout(_REGISTERED_WITHIN_S):
                await self._registered.wait()
        except TimeoutError:
            raise TransferError("the segment is not registered for RDMA yet") from None


def open_cards(settings: MessengerConfig) -> Cards:
    """Open and return the devices nearest to the segment, or all others if none of these works.

    Logs once why devices cannot be used. Raises ConfigError for an invalid topology, or if RDMA is demanded
    and missing.
    """
    if settings.transport in ("shm", "tcp"):
        return Cards([])
    topology = Topology.discover() if settings.topology is None else Topology.parse(settings.topology)
    is_demanded = settings.transport == "rdma"
    choice = topology.nics(_SEGMENT_LOCATION)
    reasons: list[str] = []
    for names in filter(None, (choice.preferred, choice.secondary)):
        adapters = _open(names, settings.rdma_gid_index, reasons)
        if adapters:
            log.info("RDMA devices: %s", ", ".join(str(adapter.device) for adapter in adapters))
            return Cards(adapters, is_demanded=is_demanded)
    reason = "; ".join(reasons or find_devices().reasons) or "no device is near the memory"
    if is_demanded:
        raise ConfigError(f"messenger.transport: rdma, but there is no device to use: {reason}")
    (log.warning if reasons else log.debug)("no RDMA: %s", reason)  # a machine without devices is no news
    return Cards([])


def _open(names: Sequence[str], gid_index: int | None, reasons: list[str]) -> list[Adapter]:
    """Return the devices of these names that could be opened.

    The reasons why other devices are not used are appended to `reasons`.
    """
    found = find_devices(names, gid_index)
    reasons += found.reasons
    adapters = []
    for device in found.devices:
        try:
            adapters.append(Adapter(device))
        except RdmaUnavailableError as error:
            reasons.append(str(error))
    if adapters:
        for reason in reasons:
            log.warning("%s", reason)
    return adapters
