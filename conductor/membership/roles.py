"""Roles of instances. The Conductor changes roles while instances run (Splitwise's mixed pool, section 4).

    SERVING ──> SWITCHING ──> SERVING in the new role, as soon as no request is left
                          ──> SERVING in the old role, if that takes too long

Weights and pool stay, so a switch takes only as long as the running requests take to end or to move. An
instance keeps its new role over restarts. It loses the role when it has been drained, or when no instance is
left for a stage of its configured role.

Owns: which role an instance has, and when it gets another one. Does not know: why, how an instance is
emptied.
"""

from collections import Counter
from enum import StrEnum

from conductor.effects import Effect
from conductor.fronts import Fronts
from conductor.membership.emptying import Emptier
from conductor.membership.modules import Modules
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.view.instances import Instance
from mooncake.messages.workers import InstanceState, Register, Role, SwitchRole

_MOST_GONE = 256
"""The number of lost instances whose roles are remembered in case they register again."""


class SwitchEnd(StrEnum):
    """The way in which a switch of an instance's role ends."""

    DONE = "done"
    TIMED_OUT = "timed_out"
    """Requests were left after `Limits.switch_timeout_s`."""
    GIVEN_UP = "given_up"
    """The order was taken back, the instance drained or was lost, or became the last one of a stage."""


class Roles:
    """The roles of the registry's instances, and the switches between them."""

    def __init__(
        self, requests: Requests, placer: Placer, emptier: Emptier, fronts: Fronts, modules: Modules
    ) -> None:
        self._placer, self._emptier, self._fronts, self._modules = placer, emptier, fronts, modules
        self._instances, self._view, self._limits = requests.instances, requests.view, requests.limits
        self._given: dict[str, Role] = {}
        """The roles that the Conductor has given to instances, by name, latest last."""
        self.num_switches = Counter(dict.fromkeys(SwitchEnd, 0))
        """The number of switches, by the way in which they ended."""

    def why_not(self, instance: Instance, role: Role, *, force: bool = False) -> str:
        """Return why an instance cannot switch to a role now; empty if it can.

        With `force` it can switch even if it is the last instance of a stage.
        """
        if instance.state is not InstanceState.SERVING:
            ends = instance.state in (InstanceState.RETIRING, InstanceState.RETIRED)
            how = "" if ends else f"; POST /admin/instances/{instance.name}/serve takes that back"
            return f"{instance.name} is {instance.state.value}{how}"
        if instance.role is role:
            return f"the role of {instance.name} is {role.value} already"
        if role is not Role.PREFILL and not instance.registration.can_decode:
            return f"{instance.name} has not all layers of the model on its device, so it cannot decode"
        if why_busy := self._modules.why_busy(instance):
            return why_busy
        stage = None if force else self._instances.stage_lost_without(instance, role)
        if stage is not None:
            return f"{instance.name} is the last instance for {stage.value}; `force` switches it all the same"
        return ""

    def switch(self, instance: Instance, role: Role, now_s: float, *, force: bool = False) -> list[Effect]:
        """Switch an instance to another role as soon as it has no requests.

        `why_not` must have returned an empty text before.
        """
        emptying = self._emptier.begin(instance, InstanceState.SWITCHING, now_s)
        assert emptying is not None
        emptying.next_role, emptying.is_forced = role, force
        effects = self._emptier.go_on(instance, now_s)
        return effects + self._fronts.tell() + self.settle(now_s)

    def give_up(self, instance: Instance, now_s: float) -> list[Effect]:
        """Return a switching instance to service in its old role."""
        return self._undo(instance, SwitchEnd.GIVEN_UP, now_s)

    def count_given_up(self) -> None:
        """Count a switch that has ended because its instance is drained or lost."""
        self.num_switches[SwitchEnd.GIVEN_UP] += 1

    def registered(self, instance: Instance) -> list[Effect]:
        """Return the order that gives a newly registered instance the role of its previous life.

        There is no order if the instance has this role already. The earlier role is forgotten if the instance
        cannot decode in it, or if no other instance is left for a stage of its configured role.
        """
        role = self._given.get(instance.name, instance.role)
        if role is instance.role:
            return []
        may_not_decode = role is not Role.PREFILL and not instance.registration.can_decode
        if may_not_decode or self._instances.lacks_stage(instance.role, role):
            self.forget(instance.name)
            return []
        instance.role = role
        return [Effect(instance.identity, SwitchRole(role))]

    def ordered_again(self, instance: Instance, register: Register) -> list[Effect]:
        """Return the order of the present role again, for an instance that repeats its registration.

        The instance has not received the answer to the first registration, and so not the order either.
        """
        return (
            [] if register.role is instance.role else [Effect(instance.identity, SwitchRole(instance.role))]
        )

    def _remember(self, name: str, role: Role) -> None:
        """Remember the role for an instance's next life. Only a limited number of lost instances is kept."""
        self.forget(name)
        self._given[name] = role
        gone = [given for given in self._given if self._instances.get(given) is None]
        for oldest in gone[:-_MOST_GONE]:
            self.forget(oldest)

    def forget(self, name: str) -> None:
        """Forget the role of an instance: its next life has the configured role."""
        self._given.pop(name, None)

    def settle(self, now_s: float) -> list[Effect]:
        """End the switches of instances that have no requests, and the switches that take too long.

        An instance that has become the last one for a stage keeps its role.
        """
        effects: list[Effect] = []
        for instance in self._instances.emptying:
            emptying = instance.emptying
            if emptying is None or emptying.next_role is None:
                continue
            role, is_forced = emptying.next_role, emptying.is_forced
            if not is_forced and self._instances.stage_lost_without(instance, role) is not None:
                effects += self._undo(instance, SwitchEnd.GIVEN_UP, now_s)
            elif not instance.requests:
                effects += self._complete(instance, role, now_s)
            elif now_s - emptying.began_s > self._limits.switch_timeout_s:
                effects += self._undo(instance, SwitchEnd.TIMED_OUT, now_s)
        return effects

    def _complete(self, instance: Instance, role: Role, now_s: float) -> list[Effect]:
        self._remember(instance.name, role)
        self._instances.serve(instance, role)
        self._view.begin_role(instance)
        self.num_switches[SwitchEnd.DONE] += 1
        effects = [Effect(instance.identity, SwitchRole(role))]
        return effects + self._placer.retry_waiting(now_s) + self._fronts.tell()

    def _undo(self, instance: Instance, end: SwitchEnd, now_s: float) -> list[Effect]:
        self.num_switches[end] += 1
        return self._emptier.end(instance, now_s) + self._fronts.tell()
