"""What an instance's messenger knows of its transfers with others, as heartbeats tell the Conductor.

Owns: what is under way at this instance's request, and how fast it lately was, by peer. Does not know: what
is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulator.clock import Clock
from benchmarks.simulator.network import Network, Port, Transfer
from mooncake.messages import PeerStats

_WEIGHT = 0.3
"""of the latest transfer's bandwidth, against all before"""
_NUM_STREAMS = 2


@dataclass(slots=True, eq=False)
class _Peer:
    under_way: dict[Transfer, None] = field(default_factory=dict)
    bytes_per_s: float | None = None


class Traffic:
    """Transfers that one instance has asked for."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self._clock, self._network = clock, network
        self._peers: dict[str, _Peer] = {}

    def send(
        self, peer: str, source: Port, destination: Port, num_bytes: float, on_end: Callable[[], None]
    ) -> Transfer:
        """Begins now, from or to `peer`."""
        known = self._peers.setdefault(peer, _Peer())
        began_s = self._clock.now_s

        def ended() -> None:
            del known.under_way[transfer]
            bytes_per_s = num_bytes / (self._clock.now_s - began_s)
            before = known.bytes_per_s
            known.bytes_per_s = bytes_per_s if before is None else before + _WEIGHT * (bytes_per_s - before)
            on_end()

        transfer = self._network.send(source, destination, num_bytes, ended)
        known.under_way[transfer] = None
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """It ends without having come."""
        self._network.cancel(transfer)
        for known in self._peers.values():
            known.under_way.pop(transfer, None)

    def stats(self) -> dict[str, PeerStats]:
        """By peer."""
        return {
            name: PeerStats(
                int(sum(map(self._network.left_bytes, known.under_way))), known.bytes_per_s, _NUM_STREAMS
            )
            for name, known in self._peers.items()
        }
