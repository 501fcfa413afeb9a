"""The fronts of the cluster, and the state of the cluster that they are told.

Owns: which fronts there are, the state of the cluster as they see it. Does not know: their requests.
"""

from conductor.effects import Effect
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instances
from mooncake.messages.fronts import ClusterState, FrontHello
from mooncake.messages.workers import PROTOCOL_VERSION, STAGES, RegisterRefused, Role


class Fronts:
    """All fronts that have said hello."""

    def __init__(self, epoch: int, fingerprint: str, instances: Instances, view: ClusterView) -> None:
        self._epoch, self._fingerprint = epoch, fingerprint
        self._instances, self._view = instances, view
        self._last_seen_s: dict[bytes, float] = {}
        """The time of each front's last message, by its identity."""
        self._max_sequence_blocks = 0
        """The longest sequence that a pair could hold when there last was an expected pair."""

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._last_seen_s

    def hello(self, sender: bytes, hello: FrontHello, now_s: float) -> Effect:
        """Add a front, or refuse it if it does not fit the cluster."""
        reason = why_unfit("this front", hello.protocol_version, hello.fingerprint, self._fingerprint)
        if reason is not None:
            return Effect(sender, RegisterRefused(reason))
        known = sender in self
        self.seen(sender, now_s)
        return Effect(sender, self._cluster_state(known=known))

    def seen(self, identity: bytes, now_s: float) -> None:
        """Record that a front is alive."""
        self._last_seen_s[identity] = now_s

    def forget(self, identity: bytes) -> None:
        """Forget a front. Idempotent."""
        self._last_seen_s.pop(identity, None)

    def silent_since(self, deadline_s: float) -> list[bytes]:
        """The fronts that were last heard before `deadline_s`."""
        return [identity for identity, seen_s in self._last_seen_s.items() if seen_s < deadline_s]

    def forgive(self, silence_s: float, now_s: float) -> None:
        """Do not count a time in which the Conductor did not listen as silence of the fronts."""
        for identity, seen_s in self._last_seen_s.items():
            self._last_seen_s[identity] = min(seen_s + silence_s, now_s)

    def tell(self) -> list[Effect]:
        """Tell all fronts the state of the cluster."""
        state = self._cluster_state()
        return [Effect(identity, state) for identity in self._last_seen_s]

    def _cluster_state(self, *, known: bool = True) -> ClusterState:
        instances = self._instances
        self._max_sequence_blocks = instances.max_sequence_blocks() or self._max_sequence_blocks
        num_serving = {stage: len(instances.serving(stage)) for stage in STAGES}
        return ClusterState(
            self._epoch,
            num_serving[Role.PREFILL],
            num_serving[Role.DECODE],
            self._max_sequence_blocks,
            self._view.mean_prefill_costs(),
            known,
            {stage: len(instances.able(stage)) - num_serving[stage] for stage in STAGES},
            instances.num_expected,
        )


def why_unfit(peer: str, protocol_version: int, fingerprint: str, own_fingerprint: str) -> str | None:
    """The reason why a peer does not fit the cluster; None if it does."""
    if protocol_version != PROTOCOL_VERSION:
        return (
            f"protocol version differs: the conductor speaks {PROTOCOL_VERSION}, "
            f"{peer} speaks {protocol_version}; run the same release everywhere"
        )
    if fingerprint != own_fingerprint:
        return (
            f"model fingerprint differs: the conductor has {own_fingerprint}, {peer} has "
            f"{fingerprint}; give both the same --model, --dtype and --kvcache-block-size"
        )
    return None
