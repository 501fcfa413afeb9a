"""The messages of operators, who take instances out of service, change roles, move requests and modules.

Fronts pass these messages on (`conductor.front.routes.admin`). An order is answered under its number, so that
several operators may order at once.

Owns: this vocabulary. Does not know: who may order, how an instance drains.
"""

import msgspec

from mooncake.messages.migration import ModulesPart, ModulesPlace
from mooncake.messages.quantities import Count, Seconds
from mooncake.messages.workers import InstanceState, Role

# -- front -> Conductor -----------------------------------------------------------------------------


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Order of an operator to drain an instance, which then leaves. Answered by `Ordered`.

    Without `is_wanted` the order is to let the instance serve again. The last instance for prefill or for
    decode is drained only with `force`. With `stays` the instance does not leave: it stays drained until it
    is ordered to serve again, or to leave.
    """

    order: Count
    instance: str
    is_wanted: bool = True
    force: bool = False
    stays: bool = False


class ChangeRole(msgspec.Struct, tag=True, frozen=True):
    """Order of an operator to change an instance's role. Answered by `Ordered`.

    Without `force` the order is refused, or given up later, if no instance would be left for prefill, or none
    for decode.
    """

    order: Count
    instance: str
    role: Role
    force: bool = False


class ListInstances(msgspec.Struct, tag=True, frozen=True):
    """The request for the status of all registered instances. Answered by `InstanceList`."""

    order: Count


class Migrate(msgspec.Struct, tag=True, frozen=True):
    """Order of an operator to move a running request to another decode instance. Answered by `Migrates`.

    `instance` is the destination; if it is None the Conductor chooses one. `request_id` may be the id of an
    answer, which stands for its first choice.
    """

    order: Count
    request_id: str
    instance: str | None = None


class MoveModules(msgspec.Struct, tag=True, frozen=True):
    """Order of an operator to move `part` of an instance to a helper. Answered by `Ordered`.

    An empty `part` is the order to move all modules back.
    """

    order: Count
    instance: str
    helper: str
    part: ModulesPart = ModulesPart()


# -- Conductor -> front -----------------------------------------------------------------------------


class InstanceStatus(msgspec.Struct, frozen=True):
    """The status of an instance as operators see it."""

    name: str
    role: Role
    state: InstanceState
    num_requests: Count
    """Requests on the instance, as prefill or as decode."""
    next_role: Role | None = None
    """The role to which the instance switches; None if it does not switch."""
    num_moved: Count = 0
    """Requests that other instances have taken over since the drain or switch began."""
    num_blocks_left: Count = 0
    """Blocks that have yet to be copied to other instances before the instance leaves."""
    since_s: Seconds = 0.0
    """Seconds for which the instance has been draining or switching."""
    stays: bool = False
    """Whether the drained instance stays in the cluster until it is ordered to serve again, or to leave."""
    modules: ModulesPlace = ModulesPlace()
    """The place of the instance's modules."""
    num_device_pages: Count = 0


class Ordered(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Drain`, `ChangeRole` and `MoveModules`.

    `refusal`: the reason of a refusal; empty if the order is accepted.
    """

    order: Count
    status: InstanceStatus | None
    """The status of the instance; None if the order names an instance, or a helper, that does not exist."""
    refusal: str = ""


class InstanceList(msgspec.Struct, tag=True, frozen=True):
    """Answer to `ListInstances`."""

    order: Count
    instances: list[InstanceStatus]
    epoch: int = 0
    """The number of the Conductor's life. Instances of an earlier Conductor may not be registered yet."""


class Migrates(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Migrate`: source and destination of the begun migration.

    `refusal`: the reason why none has begun; else empty.
    """

    order: Count
    source: str | None = None
    """The source of the migration; None if no running request has this id."""
    destination: str | None = None
    refusal: str = ""


OperatorOrder = Drain | ChangeRole | MoveModules | ListInstances | Migrate
OperatorAnswer = Ordered | InstanceList | Migrates
