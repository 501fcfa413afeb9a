"""What moves to and from one messenger at this side's request, counted where others look for it.

Owns: the counting. Does not know: the clock, requests.
"""

from messenger.paths.flow import Flow
from messenger.transport.transports import PeerTraffic, Traffic, Transport


class Movements:
    """Of one session, added to all that is in `traffic` and in `own`."""

    def __init__(self, traffic: Traffic, own: PeerTraffic) -> None:
        self.flow = Flow()
        self._traffic = traffic
        self._own = own
        self._counted_busy_s = 0.0
        self._last_transport = Transport.TCP
        """that moved something"""

    def moved(self, transport: Transport, num_bytes: int, *, received: bool) -> None:
        """Bytes have been placed and verified, at the other side or here."""
        self._last_transport = transport
        for traffic in (self._traffic, self._own):
            (traffic.received_bytes if received else traffic.sent_bytes)[transport] += num_bytes

    def ended(self, num_bytes: int, now_s: float, *, moved_bytes: int) -> None:
        """Of `num_bytes` in flight so many have arrived; the others were given up, or not there."""
        self.flow.ended(num_bytes, now_s, moved_bytes=moved_bytes)
        if moved_bytes:
            busy_s = self.flow.total_busy_s
            self._own.busy_s[self._last_transport] += busy_s - self._counted_busy_s
            self._counted_busy_s = busy_s
