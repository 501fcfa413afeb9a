"""The throughput to or from one messenger: pending bytes, recent bandwidth, and totals.

Pending bytes are in flight or queued. The Conductor estimates transfer times from these numbers (Algorithm 1
of the Mooncake paper).

Owns: the arithmetic, the counters of metrics. Does not know: the clock, connections.
"""

from dataclasses import dataclass

from messenger.transport.transports import PeerTraffic, Traffic, Transport

_SAMPLE_S = 0.05
"""Seconds of traffic in one sample, so that a single late wake-up does not look like a slow path."""
_LEAST_SAMPLE_BYTES = 1 << 20
"""The fewest bytes of a sample, because the time of fewer bytes would show the latency, not the bandwidth."""
_WEIGHT = 0.3
"""The weight of the latest sample, from 0 to 1."""


@dataclass(slots=True)
class Throughput:
    """The throughput of one session.

    Only time with pending bytes counts, so an idle path does not look slow.
    """

    pending_bytes: int = 0
    bandwidth_bytes_per_s: float | None = None
    """The moving average of the samples, in bytes a second; None before the first sample."""
    total_busy_s: float = 0.0
    """Seconds with pending bytes, up to the end of the latest request."""
    _since_s: float = 0.0
    _busy_s: float = 0.0
    """Seconds with pending bytes since the last sample."""
    _moved_bytes: int = 0
    """Bytes moved since the last sample."""

    def begun(self, num_bytes: int, now_s: float) -> None:
        if not self.pending_bytes:
            self._since_s = now_s
        self.pending_bytes += num_bytes

    def ended(self, num_bytes: int, now_s: float, *, moved_bytes: int) -> None:
        """Record the end of a request for `num_bytes`, of which `moved_bytes` have arrived."""
        self.pending_bytes -= num_bytes
        self._moved_bytes += moved_bytes
        self._busy_s += now_s - self._since_s
        self.total_busy_s += now_s - self._since_s
        self._since_s = now_s
        if not self._moved_bytes and not self.pending_bytes:
            self._busy_s = 0.0  # requests that moved nothing say nothing about the path
        is_enough = self._moved_bytes >= _LEAST_SAMPLE_BYTES
        if is_enough and (self._busy_s >= _SAMPLE_S or not self.pending_bytes):
            self._sample(self._moved_bytes / max(self._busy_s, 1e-6))
            self._busy_s, self._moved_bytes = 0.0, 0

    def _sample(self, bandwidth_bytes_per_s: float) -> None:
        last = self.bandwidth_bytes_per_s
        self.bandwidth_bytes_per_s = (
            bandwidth_bytes_per_s if last is None else last + _WEIGHT * (bandwidth_bytes_per_s - last)
        )


class TransferCounters:
    """The counters of one session, which also add to the totals in `traffic` and, for this peer, in `own`."""

    def __init__(self, traffic: Traffic, own: PeerTraffic) -> None:
        self.throughput = Throughput()
        self._traffic = traffic
        self._own = own
        self._counted_busy_s = 0.0
        self._last_transport = Transport.TCP
        """The transport that has moved bytes last."""

    def moved(self, transport: Transport, num_bytes: int, *, received: bool) -> None:
        """Count bytes that have been placed and verified: on this side if `received`, else at the peer."""
        self._last_transport = transport
        for traffic in (self._traffic, self._own):
            (traffic.received_bytes if received else traffic.sent_bytes)[transport] += num_bytes

    def ended(self, num_bytes: int, now_s: float, *, moved_bytes: int) -> None:
        """Record the end of a request for `num_bytes`, of which `moved_bytes` have arrived."""
        self.throughput.ended(num_bytes, now_s, moved_bytes=moved_bytes)
        if moved_bytes:
            busy_s = self.throughput.total_busy_s
            self._own.busy_s[self._last_transport] += busy_s - self._counted_busy_s
            self._counted_busy_s = busy_s
