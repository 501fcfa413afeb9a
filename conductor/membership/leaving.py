"""Instances that drain: their requests and the blocks that only they hold go to others, then they leave.

    SERVING, SWITCHING ──> DRAINING ──> RETIRED, when nothing is left
                                    ──> SERVING, if the order is taken back
                       ──> RETIRING ──> RETIRED

Owns: an instance's way out of the cluster. Does not know: sockets, how its requests are taken away.
"""

from conductor.effects import Effect
from conductor.fronts import Fronts
from conductor.membership.emptying import Emptier
from conductor.membership.roles import Roles
from conductor.requests.registry import Requests
from conductor.view.instances import Instance
from mooncake.messages.workers import InstanceState, Retired


class Leaving:
    """Drains the registry's instances."""

    def __init__(self, requests: Requests, emptier: Emptier, roles: Roles, fronts: Fronts) -> None:
        self._emptier, self._roles, self._fronts = emptier, roles, fronts
        self._instances = requests.instances

    def why_not(self, instance: Instance, *, force: bool = False) -> str:
        """Why an instance may not be drained; empty if it may, or is drained already."""
        if force or instance.state not in (InstanceState.SERVING, InstanceState.SWITCHING):
            return ""
        stage = self._instances.stage_of_none_but(instance)
        if stage is None:
            return ""
        return f"{instance.name} is the last instance for {stage.value}; `force` drains it all the same"

    def order(self, instance: Instance, now_s: float, *, leaves: bool) -> list[Effect]:
        """Drain an instance as an operator orders, who may change the order while it drains."""
        effects = self._begin(instance, InstanceState.DRAINING, now_s)
        if instance.state is InstanceState.DRAINING:
            assert instance.emptying is not None
            instance.emptying.leaves = leaves
        return effects + self.settle()

    def retire(self, instance: Instance, now_s: float) -> list[Effect]:
        """Drain an instance whose worker has been told to end. No effects if it does that already."""
        return self._begin(instance, InstanceState.RETIRING, now_s) + self.settle()

    def _begin(self, instance: Instance, state: InstanceState, now_s: float) -> list[Effect]:
        was_switching = instance.state is InstanceState.SWITCHING
        if self._emptier.begin(instance, state, now_s) is None:
            return []
        if was_switching:
            self._roles.given_up()
        return self._emptier.go_on(instance, now_s) + self._fronts.tell()

    def serve_again(self, instance: Instance, now_s: float) -> list[Effect]:
        """Take an order to drain back. No effects if the instance is about to end."""
        return self._emptier.end(instance, now_s) + self._fronts.tell()

    def settle(self) -> list[Effect]:
        """Let instances end that are to leave and have nothing left."""
        effects: list[Effect] = []
        for instance in self._instances.emptying:
            if self._has_nothing_left(instance) and self._instances.retire(instance):
                self._roles.forget(instance.name)
                effects.append(Effect(instance.identity, Retired()))
        return effects

    @staticmethod
    def _has_nothing_left(instance: Instance) -> bool:
        emptying = instance.emptying
        is_to_leave = instance.state is InstanceState.RETIRING or (emptying is not None and emptying.leaves)
        return is_to_leave and not instance.requests
