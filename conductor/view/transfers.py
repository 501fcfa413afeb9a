"""Predicted times of KVCache transfers between instances (Mooncake, section 6.1).

    time = latency + (bytes in flight at the source + bytes) / the source's bandwidth
           + bytes on SSD / SSD bandwidth

"It is determined not only by the size of the transferred data but also by the current network status,
especially whether the sending node is under congestion." Heartbeats report the bytes in flight between any
two messengers, and their recent bandwidth. An instance without transfers so far is assumed to have the
typical bandwidth.

Owns: traffic by slot. Does not know: why blocks are fetched, prefills.
"""

import numpy as np
from numpy.typing import NDArray

from conductor.view.estimators import Floats
from mooncake.messages.pools import PoolStats

LATENCY_S = 1e-3
"""Seconds of a transfer without bytes."""
GENERIC_BYTES_PER_S = 10e9
"""The bandwidth in bytes a second that is assumed before the first transfer.

It is too high rather than too low: with a low value nothing would be fetched, and so nothing learned.
"""
SSD_BYTES_PER_S = 2e9
"""The assumed bandwidth in bytes a second from SSD to DRAM."""
_RISE, _FALL = 0.3, 0.05
"""The weights with which a measured bandwidth counts: `_RISE` if it is higher than before, `_FALL` if lower.

A lower one counts less, because small transfers are always slow.
"""


class TransferEstimator:
    """The traffic and bandwidth of all slots."""

    def __init__(self) -> None:
        self.in_flight_bytes = np.zeros(0)
        """Bytes from and to each instance, as of the latest heartbeats."""
        self.ordered_bytes = np.zeros(0)
        """Bytes that are to be fetched from each instance, by prefills and migrations that have not ended."""
        self._bytes_per_s: dict[int, float] = {}
        """The recent bandwidth between an instance and all others, by slot, as either side reports it."""
        self._typical_bytes_per_s: float | None = None
        """The recent bandwidth between any two instances, from all reports; None before the first report."""
        self._reported: dict[int, dict[int, int]] = {}  # by reporter: bytes between it and other slots

    def reset(self, slot: int) -> None:
        """Reset the traffic of a slot for another instance, or for none. Slots are added as needed."""
        self._forget_report(slot)
        missing = np.zeros(max(0, slot + 1 - len(self.in_flight_bytes)))
        self.in_flight_bytes = np.append(self.in_flight_bytes, missing)
        self.ordered_bytes = np.append(self.ordered_bytes, missing)
        self.in_flight_bytes[slot] = self.ordered_bytes[slot] = 0.0
        self._bytes_per_s.pop(slot, None)
        for reporter, by_slot in self._reported.items():
            self.in_flight_bytes[reporter] -= by_slot.pop(slot, 0)

    def learn(self, slot: int, pools: list[PoolStats], slot_of: dict[str, int]) -> None:
        """Update traffic and bandwidth from the heartbeat of an instance.

        `slot_of` has the slot of each messenger's instance.
        """
        self._forget_report(slot)
        report: dict[int, int] = {}
        for pool in pools:
            for name, peer in pool.peers.items():
                other = slot_of.get(name)
                if other is None or other == slot:
                    continue
                report[other] = report.get(other, 0) + peer.in_flight_bytes
                self.in_flight_bytes[[slot, other]] += peer.in_flight_bytes
                if peer.bandwidth_bytes_per_s:
                    self._seen(slot, other, peer.bandwidth_bytes_per_s)
        self._reported[slot] = report

    def _seen(self, slot: int, other: int, bytes_per_s: float) -> None:
        """Update the bandwidth between two instances by a measured one, in bytes a second."""
        for end in (slot, other):
            self._bytes_per_s[end] = _followed(self._bytes_per_s.get(end), bytes_per_s)
        self._typical_bytes_per_s = _followed(self._typical_bytes_per_s, bytes_per_s)

    def ahead_bytes(self, slots: NDArray[np.intp]) -> Floats:
        """Return the bytes ahead of a new fetch at each of these sources."""
        return np.maximum(self.in_flight_bytes, self.ordered_bytes)[slots]

    def costs(self, source: int, num_ssd_bytes: float) -> tuple[float, float]:
        """Return the seconds until the first byte of a fetch arrives, and the seconds for each byte.

        Args:
            source: The slot of the source.
            num_ssd_bytes: The bytes of the fetch that the source has on SSD only.
        """
        typical = self._typical_bytes_per_s or GENERIC_BYTES_PER_S
        bytes_per_s = self._bytes_per_s.get(source, typical)
        ahead_bytes = max(self.in_flight_bytes.item(source), self.ordered_bytes.item(source))
        first_s = LATENCY_S + ahead_bytes / bytes_per_s + num_ssd_bytes / SSD_BYTES_PER_S
        return first_s, 1.0 / bytes_per_s

    def _forget_report(self, slot: int) -> None:
        for other, num_bytes in self._reported.pop(slot, {}).items():
            self.in_flight_bytes[[slot, other]] -= num_bytes


def _followed(before: float | None, latest: float) -> float:
    if before is None:
        return latest
    return before + (_RISE if latest > before else _FALL) * (latest - before)
