"""The fronts of the cluster, and the state of the cluster that the Conductor reports to them.

Owns: the list of fronts, the state of the cluster as fronts see it. Does not know: requests.
"""

from dataclasses import dataclass

from conductor.effects import Effect
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instances
from mooncake.messages.fronts import ClusterState, FrontHello
from mooncake.messages.workers import SPOKEN, STAGES, RegisterRefused, Role
from mooncake.versions import Versions


@dataclass(slots=True)
class Front:
    """A front that has registered by its hello."""

    last_seen_s: float
    version: int
    """The newest protocol version that both front and Conductor speak. No newer message is sent."""


class Fronts:
    """All registered fronts, and the cluster state that the Conductor reports to them."""

    def __init__(self, epoch: int, fingerprint: str, instances: Instances, view: ClusterView) -> None:
        self._epoch, self._fingerprint = epoch, fingerprint
        self._instances, self._view = instances, view
        self._by_identity: dict[bytes, Front] = {}
        self._max_sequence_blocks = 0
        """Blocks of the longest sequence that a pair can hold, as of the last time there was a pair."""

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._by_identity

    @property
    def versions(self) -> list[int]:
        """The protocol versions that the Conductor speaks with its fronts, one for each front."""
        return [front.version for front in self._by_identity.values()]

    def hello(self, sender: bytes, hello: FrontHello, now_s: float) -> Effect:
        """Register a front, or refuse a front that does not fit the cluster. Returns the answer."""
        reason = why_unfit("this front", hello.versions, hello.fingerprint, self._fingerprint)
        if reason is not None:
            return Effect(sender, RegisterRefused(reason))
        known = sender in self
        version = SPOKEN.common(hello.versions)
        assert version is not None, "it fits"
        self._by_identity[sender] = Front(now_s, version)
        return Effect(sender, self._cluster_state(version, known=known))

    def seen(self, identity: bytes, now_s: float) -> None:
        """Record that a front was heard from at `now_s`."""
        self._by_identity[identity].last_seen_s = now_s

    def forget(self, identity: bytes) -> None:
        """Forget a front. Idempotent."""
        self._by_identity.pop(identity, None)

    def silent_since(self, deadline_s: float) -> list[bytes]:
        """Return the identities of the fronts that were last heard from before `deadline_s`."""
        return [identity for identity, front in self._by_identity.items() if front.last_seen_s < deadline_s]

    def forgive(self, silence_s: float, now_s: float) -> None:
        """Extend the deadlines of all fronts by `silence_s`, in which the Conductor did not listen."""
        for front in self._by_identity.values():
            front.last_seen_s = min(front.last_seen_s + silence_s, now_s)

    def tell(self) -> list[Effect]:
        """Return the messages that tell all fronts the state of the cluster."""
        states = {version: self._cluster_state(version) for version in set(self.versions)}
        return [Effect(identity, states[front.version]) for identity, front in self._by_identity.items()]

    def _cluster_state(self, version: int, *, known: bool = True) -> ClusterState:
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
            version,
        )


def why_unfit(peer: str, versions: Versions, fingerprint: str, own_fingerprint: str) -> str | None:
    """Return the reason why a peer does not fit the cluster; None if it does."""
    if SPOKEN.common(versions) is None:
        advice = SPOKEN.advice("the conductor", versions, peer)
        return f"protocol version differs: the conductor speaks {SPOKEN}, {peer} speaks {versions}; {advice}"
    if fingerprint != own_fingerprint:
        return (
            f"model fingerprint differs: the conductor has {own_fingerprint}, {peer} has "
            f"{fingerprint}; give both the same --model, --dtype and --kvcache-block-size"
        )
    return None
