"""The network between instances. The transfers of an instance share its NICs evenly, in each direction.

A transfer is as fast as the busier of its two ends allows. Bandwidth that a transfer cannot use is not given
to others, so the simulation is never faster than max-min fairness.

Owns: the speed of each transfer. Does not know: what is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.tools.simulator.cluster.machines.clock import Clock


@dataclass(slots=True, eq=False)
class Port:
    """One direction of an instance's NICs."""

    bytes_per_s: float
    transfers: dict["Transfer", None] = field(default_factory=dict)
    """The transfers in the order in which they began, so that simulations are reproducible."""
    sent_bytes: float = 0.0

    @property
    def share_bytes_per_s(self) -> float:
        return self.bytes_per_s / len(self.transfers)


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer in progress. `on_end` is called when its last byte has arrived."""

    source: Port
    destination: Port
    left_bytes: float
    on_end: Callable[[], None]
    since_s: float
    """The time at which `left_bytes` were left."""
    bytes_per_s: float = 0.0
    version: int = 0
    """The number of times that the end was predicted. Only the event of the latest prediction counts."""


class Network:
    """The network, which starts, shares out and ends transfers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def send(self, source: Port, destination: Port, num_bytes: float, on_end: Callable[[], None]) -> Transfer:
        """Start a transfer now. `on_end` is called when its last byte has arrived."""
        transfer = Transfer(source, destination, num_bytes, on_end, self._clock.now_s)
        source.sent_bytes += num_bytes
        source.transfers[transfer] = destination.transfers[transfer] = None
        self._share_anew(source, destination)
        return transfer

    def left_bytes(self, transfer: Transfer) -> float:
        """Return the bytes that have not arrived yet."""
        passed_s = self._clock.now_s - transfer.since_s
        return max(0.0, transfer.left_bytes - passed_s * transfer.bytes_per_s)

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer before it has arrived. Idempotent."""
        if transfer in transfer.source.transfers:
            self._remove(transfer)

    def _remove(self, transfer: Transfer) -> None:
        transfer.version += 1
        del transfer.source.transfers[transfer], transfer.destination.transfers[transfer]
        self._share_anew(transfer.source, transfer.destination)

    def _share_anew(self, source: Port, destination: Port) -> None:
        now_s = self._clock.now_s
        for transfer in source.transfers | destination.transfers:
            rate = min(transfer.source.share_bytes_per_s, transfer.destination.share_bytes_per_s)
            if rate == transfer.bytes_per_s:
                continue
            transfer.left_bytes = self.left_bytes(transfer)
            transfer.since_s, transfer.bytes_per_s = now_s, rate
            transfer.version += 1
            end_s = now_s + transfer.left_bytes / rate
            self._clock.at(end_s, self._end, transfer, transfer.version)

    def _end(self, transfer: Transfer, version: int) -> None:
        if version == transfer.version:
            self._remove(transfer)
            transfer.on_end()
