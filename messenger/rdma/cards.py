"""The RDMA devices that a messenger uses, with its segment registered on each of them.

Owns: opening and choosing devices. Does not know: peers, transfers.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.memory import RdmaMemory
from messenger.topology import Topology
from mooncake.config import MessengerConfig
from mooncake.errors import ConfigError, TransferError

_SEGMENT_LOCATION = "cpu:0"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """A device and the segment on it, which is opened to a peer by grants only."""

    adapter: Adapter
    memory: RdmaMemory

    def endpoint(self, peer: str) -> Endpoint:
        """A queue pair that is not connected yet. Raises RdmaUnavailableError."""
        return Endpoint(self.adapter, self.memory, peer)


class Cards:
    """All of them, the preferred ones first; empty where there is no RDMA. Close them after all endpoints."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._by_name = {card.adapter.device.name: card for card in cards}
        self._turns = itertools.cycle(cards)

    @classmethod
    def open(cls, segment: memoryview, topology: Topology, location: str, gid_index: int | None) -> "Cards":
        """The devices near `location`, or all that work where none of those does. Says once in the log why
        there are none."""
        choice = topology.nics(location)
        for names in (choice.preferred, choice.secondary):
            cards = _open(segment, names, gid_index) if names else []
            if cards:
                log.info("RDMA devices: %s", ", ".join(str(card.adapter.device) for card in cards))
                return cls(cards)
        if not choice.preferred and not choice.secondary:
            log.info("no RDMA: %s", "; ".join(find_devices().reasons) or "no device is near the memory")
        return cls([])

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def card(self, name: str) -> Card:
        return self._by_name[name]

    def next(self) -> Card:
        """In turn, for those who come. Raises TransferError if there is none."""
        if not self._by_name:
            raise TransferError("there is no RDMA device in use here")
        return next(self._turns)

    def close(self) -> None:
        for card in self._by_name.values():
            card.adapter.close()


def open_cards(settings: MessengerConfig, segment: memoryview) -> Cards:
    """As configured. Raises ConfigError for a topology that is none, or if RDMA is demanded and not there."""
    if settings.transport in ("shm", "tcp"):
        return Cards([])
    topology = Topology.discover() if settings.topology is None else Topology.parse(settings.topology)
    cards = Cards.open(segment, topology, _SEGMENT_LOCATION, settings.rdma_gid_index)
    if settings.transport == "rdma" and not cards.names:
        raise ConfigError(
            "messenger.transport: rdma, but no RDMA device works here; mooncake-doctor says why"
        )
    return cards


def _open(segment: memoryview, names: Sequence[str], gid_index: int | None) -> list[Card]:
    found = find_devices(names, gid_index)
    for reason in found.reasons:
        log.warning("%s", reason)
    cards = []
    for device in found.devices:
        try:
            adapter = Adapter(device)
            cards.append(Card(adapter, adapter.register(segment)))
        except RdmaUnavailableError as error:
            log.error("%s is not used: %s", device, error)
    return cards
