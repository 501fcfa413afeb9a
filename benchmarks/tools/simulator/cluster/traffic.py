"""An instance's transfers with others, as its messenger reports them in heartbeats.

Owns: the transfers in flight that this instance has begun, and their recent bandwidth, by peer. Does not
know: what is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.network import Network, Port, Transfer
from mooncake.messages.pools import PeerStats

_WEIGHT = 0.3
"""The weight of the latest transfer in the moving average of a peer's bandwidth."""
_NUM_STREAMS = 2


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    under_way: dict[Transfer, None] = field(default_factory=dict)
    bytes_per_s: float | None = None


class Traffic:
    """The transfers that one instance has begun."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self._clock, self._network = clock, network
        self._peers: dict[str, _Peer] = {}
        self._peer_of: dict[Transfer, _Peer] = {}
        """The peer of each transfer in flight."""
        self._active: dict[_Peer, None] = {}
        """The peers that have had a transfer in flight at any time since the last report."""

    def send(
        self, name: str, source: Port, destination: Port, num_bytes: float, on_end: Callable[[], None]
    ) -> Transfer:
        """Start a transfer from or to the instance `name` now. `on_end` is called when it has arrived."""
        peer = self._peers.setdefault(name, _Peer(name))
        began_s = self._clock.now_s

        def ended() -> None:
            self._forget(transfer)
            bytes_per_s = num_bytes / (self._clock.now_s - began_s)
            before = peer.bytes_per_s
            peer.bytes_per_s = bytes_per_s if before is None else before + _WEIGHT * (bytes_per_s - before)
            on_end()

        transfer = self._network.send(source, destination, num_bytes, ended)
        self._peer_of[transfer] = peer
        peer.under_way[transfer] = self._active[peer] = None
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer before it has arrived. Idempotent."""
        if transfer in self._peer_of:
            self._forget(transfer)
            self._network.cancel(transfer)

    def _forget(self, transfer: Transfer) -> None:
        del self._peer_of.pop(transfer).under_way[transfer]

    def stats(self) -> dict[str, PeerStats]:
        """Return the counters of each peer that has had a transfer in flight since the last report."""
        if not self._active:
            return {}
        report = {}
        for peer in self._active:
            in_flight_bytes = int(sum(map(self._network.left_bytes, peer.under_way)))
            report[peer.name] = PeerStats(in_flight_bytes, peer.bytes_per_s, _NUM_STREAMS)
        self._active = {peer: None for peer in self._active if peer.under_way}
        return report
