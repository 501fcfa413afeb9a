"""Draining of instances, which then leave, or stay without requests.

Their requests, and the blocks that only they hold, go to other instances. Modules that they host go back to
their owners.

    SERVING, SWITCHING ──> DRAINING, by order of an operator
                       ──> RETIRING, when the instance's worker has been told to end
    DRAINING           ──> RETIRED, when nothing is left, unless the order says that the instance stays
                       ──> SERVING, if the order is taken back
                       ──> RETIRING
    RETIRING           ──> RETIRED, when nothing is left

Owns: an instance's way out of the cluster. Does not know: sockets, how requests are moved away, which blocks
are copied.
"""

from conductor.effects import Effect
from conductor.fronts import Fronts
from conductor.membership.emptying import Emptier
from conductor.membership.modules import Modules
from conductor.membership.roles import Roles
from conductor.replication.evacuation import Evacuation
from conductor.requests.registry import Requests
from conductor.view.instances import Instance
from mooncake.messages.workers import InstanceState, Retired


class Leaving:
    """Drains the registry's instances."""

    def __init__(
        self,
        requests: Requests,
        emptier: Emptier,
        evacuation: Evacuation,
        roles: Roles,
        fronts: Fronts,
        modules: Modules,
    ) -> None:
        self._modules = modules
        self._emptier, self._evacuation, self._roles, self._fronts = emptier, evacuation, roles, fronts
        self._instances = requests.instances

    def why_not(self, instance: Instance, *, force: bool = False) -> str:
        """Return why an instance cannot be drained; empty if it can, or if it drains already.

        With `force` it can be drained even if it is the last instance of a stage.
        """
        if force or instance.state not in (InstanceState.SERVING, InstanceState.SWITCHING):
            return ""
        stage = self._instances.stage_lost_without(instance)
        if stage is None:
            return ""
        return f"{instance.name} is the last instance for {stage.value}; `force` drains it all the same"

    def order(self, instance: Instance, now_s: float, *, leaves: bool) -> list[Effect]:
        """Drain an instance by order of an operator. With `leaves` the instance retires in the end.

        A later order can change `leaves` while the instance drains.
        """
        return self._drain(instance, InstanceState.DRAINING, now_s, leaves=leaves)

    def retire(self, instance: Instance, now_s: float) -> list[Effect]:
        """Drain an instance whose worker has been told to end. The instance cannot return to service."""
        return self._drain(instance, InstanceState.RETIRING, now_s, leaves=True)

    def _drain(self, instance: Instance, state: InstanceState, now_s: float, *, leaves: bool) -> list[Effect]:
        was_switching = instance.state is InstanceState.SWITCHING
        emptying, effects = self._emptier.begin(instance, state, now_s), list[Effect]()
        if emptying is not None:
            if was_switching:
                self._roles.count_given_up()
            effects = self._emptier.go_on(instance, now_s) + self._fronts.tell()
        if instance.emptying is not None:
            if instance.state is state:
                instance.emptying.leaves = leaves
            if state is InstanceState.DRAINING:
                instance.emptying.is_for_good = leaves
        return effects + self.go_on(now_s) + self.settle()

    def serve_again(self, instance: Instance, now_s: float) -> list[Effect]:
        """Cancel an order to drain. An instance whose worker was told to end goes on draining."""
        return self._emptier.end(instance, now_s) + self.go_on(now_s) + self._fronts.tell()

    def go_on(self, now_s: float) -> list[Effect]:
        """Order copies of leaving instances' blocks, and the return of modules that are called back.

        Only copies for which other instances have room are ordered. The caller should call it about twice a
        second.
        """
        leaving = [instance for instance in self._instances.emptying if self._is_to_leave(instance)]
        return self._evacuation.go_on(leaving, now_s) + self._modules.call_back(now_s)

    def settle(self) -> list[Effect]:
        """Retire the leaving instances that have no requests, no blocks to copy, and no hosted modules."""
        effects: list[Effect] = []
        for instance in self._instances.emptying:
            emptying = instance.emptying
            if emptying is None or not self._is_to_leave(instance):
                continue
            if instance.requests or emptying.num_blocks_left or self._modules.owners_at(instance):
                continue
            if self._instances.retire(instance):
                self._roles.forget(instance.name)
                effects.append(Effect(instance.identity, Retired(emptying.is_for_good)))
        return effects

    @staticmethod
    def _is_to_leave(instance: Instance) -> bool:
        emptying = instance.emptying
        return emptying is not None and emptying.leaves and instance.state is not InstanceState.RETIRED
