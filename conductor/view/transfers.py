"""How long KVCache takes from one instance to another (Mooncake, section 6.1).

    latency + (bytes in flight at the source + bytes) / bandwidth of the source + bytes on SSD / SSD bandwidth

"It is determined not only by the size of the transferred data but also by the current network status,
especially whether the sending node is under congestion." Heartbeats say what is in flight between any two
messengers, and how quick it lately was. An instance whose transfers nobody has seen is taken to be like the
others.

Owns: traffic by slot. Does not know: who fetches what, prefills.
"""

import numpy as np
from numpy.typing import NDArray

from conductor.view.estimators import Floats
from mooncake.messages.pools import PoolStats

LATENCY_S = 1e-3
GENERIC_BYTES_PER_S = 10e9
"""before the first transfers. Quick rather than slow: from whom nothing is fetched nothing is learned"""
SSD_BYTES_PER_S = 2e9
_RISE, _FALL = 0.3, 0.05
"""weight of the latest report of a bandwidth, against all before: small transfers are slow by themselves"""


class TransferEstimator:
    """Traffic of all slots."""

    def __init__(self) -> None:
        self.in_flight_bytes = np.zeros(0)
        """from and to each instance, in the latest heartbeats"""
        self.ordered_bytes = np.zeros(0)
        """that fetches from each instance are about to move: ordered, and their prefills have not ended"""
        self._bytes_per_s: dict[int, float] = {}
        """lately seen between an instance and others, by either side"""
        self._typical_bytes_per_s: float | None = None
        """between any two"""
        self._reported: dict[int, dict[int, int]] = {}  # by reporter: bytes between it and other slots

    def reset(self, slot: int) -> None:
        """Another instance, or none, has this slot now; slots are added as needed."""
        self._forget_report(slot)
        missing = np.zeros(max(0, slot + 1 - len(self.in_flight_bytes)))
        for name in ("in_flight_bytes", "ordered_bytes"):
            setattr(self, name, np.append(getattr(self, name), missing))
            getattr(self, name)[slot] = 0.0
        self._bytes_per_s.pop(slot, None)
        for reporter, by_slot in self._reported.items():
            self.in_flight_bytes[reporter] -= by_slot.pop(slot, 0)

    def heard(self, slot: int, pools: list[PoolStats], slot_of: dict[str, int]) -> None:
        """An instance's heartbeat. `slot_of`: of the instances that messengers, by their names, belong to."""
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
        """So quick the way between these two is."""
        for end in (slot, other):
            self._bytes_per_s[end] = _followed(self._bytes_per_s.get(end), bytes_per_s)
        self._typical_bytes_per_s = _followed(self._typical_bytes_per_s, bytes_per_s)

    def ahead_bytes(self, slots: NDArray[np.intp]) -> Floats:
        """What a new fetch from each of these waits for."""
        return np.maximum(self.in_flight_bytes, self.ordered_bytes)[slots]

    def costs(self, source: int, num_ssd_bytes: float) -> tuple[float, float]:
        """Seconds until the first byte comes from the instance at `source`, and for each byte.

        `num_ssd_bytes`: of what is fetched, on its SSDs only.
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
