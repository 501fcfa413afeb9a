"""Orders of operators: to drain an instance, to change its role, to move a request or modules.

Owns: which orders are refused, the answers to operators. Does not know: how an order is carried out.
"""

from conductor.effects import Effect
from conductor.membership.leaving import Leaving
from conductor.membership.modules import Modules, is_wanted_back, told_place_of
from conductor.membership.roles import Roles
from conductor.requests.migrations import Migrations
from conductor.view.instances import Emptying, Instance, Instances
from mooncake.messages.operators import (
    ChangeRole,
    Drain,
    InstanceList,
    InstanceStatus,
    ListInstances,
    Migrate,
    MoveModules,
    OperatorOrder,
    Ordered,
)
from mooncake.messages.workers import InstanceState


class Operators:
    """Carries out or refuses the orders of operators. `epoch` is the Conductor's epoch."""

    def __init__(
        self,
        epoch: int,
        instances: Instances,
        leaving: Leaving,
        roles: Roles,
        migrations: Migrations,
        modules: Modules,
    ) -> None:
        self._epoch = epoch
        self._instances, self._leaving, self._roles = instances, leaving, roles
        self._migrations, self._modules = migrations, modules

    def on_order(self, sender: bytes, order: OperatorOrder, now_s: float) -> list[Effect]:
        """Carry out or refuse an order that an operator has sent through the front `sender`.

        Returns the answer and the messages that follow from the order.
        """
        if isinstance(order, ListInstances):
            all_of_them = [status_of(instance, now_s) for instance in self._instances]
            return [Effect(sender, InstanceList(order.order, all_of_them, self._epoch))]
        if isinstance(order, Migrate):
            return self._migrations.on_migrate(sender, order, now_s)
        instance = self._instances.get(order.instance)
        if instance is None:
            return [Effect(sender, Ordered(order.order, None, self._instances.why_unknown(order.instance)))]
        if isinstance(order, MoveModules):
            refusal, effects = self._move_modules(instance, order, now_s)
        else:
            refusal = self._why_not(instance, order)
            effects = [] if refusal else self._obey(instance, order, now_s)
        return [*effects, Effect(sender, Ordered(order.order, status_of(instance, now_s), refusal))]

    def _move_modules(self, owner: Instance, order: MoveModules, now_s: float) -> tuple[str, list[Effect]]:
        helper = self._instances.get(order.helper)
        if helper is None:
            return self._instances.why_unknown(order.helper), []
        is_repeated = not order.part and is_wanted_back(owner, helper)
        if not is_repeated and (refusal := self._modules.why_not(owner, helper, order.part)):
            return refusal, []
        if not order.part:
            return "", self._modules.take_back(owner, helper, now_s)
        return "", self._modules.order(owner, helper, now_s, order.part)

    def _why_not(self, instance: Instance, order: Drain | ChangeRole) -> str:
        if isinstance(order, ChangeRole):
            return self._roles.why_not(instance, order.role, force=order.force)
        if order.is_wanted:
            return self._leaving.why_not(instance, force=order.force)
        ends = instance.state in (InstanceState.RETIRING, InstanceState.RETIRED)
        return f"{instance.name} is {instance.state.value}" if ends else ""

    def _obey(self, instance: Instance, order: Drain | ChangeRole, now_s: float) -> list[Effect]:
        if isinstance(order, ChangeRole):
            return self._roles.switch(instance, order.role, now_s, force=order.force)
        if order.is_wanted:
            return self._leaving.order(instance, now_s, leaves=not order.stays)
        if instance.state is InstanceState.SWITCHING:
            return self._roles.give_up(instance, now_s)
        return self._leaving.serve_again(instance, now_s)


def status_of(instance: Instance, now_s: float) -> InstanceStatus:
    """Return an instance's status for operators."""
    emptying = instance.emptying or Emptying(now_s)
    return InstanceStatus(
        instance.name,
        instance.role,
        instance.state,
        len(instance.requests),
        emptying.next_role,
        emptying.num_moved,
        emptying.num_blocks_left,
        max(0.0, now_s - emptying.began_s),
        instance.state is InstanceState.DRAINING and not emptying.leaves,
        told_place_of(instance),
        instance.num_device_pages,
    )
