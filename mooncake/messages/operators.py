"""The messages by which operators take instances out of service, change their roles, move requests and heads.

Fronts pass them on (`conductor.front.routes.admin`). An order is answered under its number, so that several
operators may order at once.

Owns: this vocabulary. Does not know: who may order, how an instance drains.
"""

import msgspec

from mooncake.messages.migration import HeadsPlace, LayerRange
from mooncake.messages.quantities import Count, Seconds
from mooncake.messages.workers import InstanceState, Role

# -- front -> Conductor -----------------------------------------------------------------------------


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Drain an instance, which then leaves, or (not `is_wanted`) let it serve again. Answered by `Ordered`.

    The last instance that can do a stage is drained only with `force`. With `stays` the instance does not
    leave: it stays drained until it is ordered to serve again, or to leave.
    """

    order: Count
    instance: str
    is_wanted: bool = True
    force: bool = False
    stays: bool = False


class ChangeRole(msgspec.Struct, tag=True, frozen=True):
    """Give an instance another role. Answered by `Ordered`.

    The last instance that can do a stage stays able to do it unless `force`.
    """

    order: Count
    instance: str
    role: Role
    force: bool = False


class ListInstances(msgspec.Struct, tag=True, frozen=True):
    """Ask for all registered instances. Answered by `InstanceList`."""

    order: Count


class Migrate(msgspec.Struct, tag=True, frozen=True):
    """Move a running request to another decode instance. Answered by `Migrates`.

    Without `instance` the Conductor chooses one. The id of an answer stands for its first choice.
    """

    order: Count
    request_id: str
    instance: str | None = None


class MoveHeads(msgspec.Struct, tag=True, frozen=True):
    """Have `layers`, or the last `num_heads` KV heads, of an instance at a helper; without either: have back
    what is there. Answered by `Ordered`."""

    order: Count
    instance: str
    helper: str
    num_heads: Count = 0
    layers: LayerRange | None = None

    @property
    def is_back(self) -> bool:
        """Whether the order is to have all back."""
        return self.num_heads == 0 and self.layers is None


# -- Conductor -> front -----------------------------------------------------------------------------


class InstanceStatus(msgspec.Struct, frozen=True):
    """An instance as operators see it."""

    name: str
    role: Role
    state: InstanceState
    num_requests: Count
    """Requests that it has, as prefill or as decode instance."""
    next_role: Role | None = None
    """The role that it switches to."""
    num_moved: Count = 0
    """Requests that other instances have taken over since it began to drain or to switch."""
    num_blocks_left: Count = 0
    """Blocks that are yet to be copied to other instances before it leaves."""
    since_s: Seconds = 0.0
    """Seconds for which it has been draining or switching."""
    stays: bool = False
    """Whether it drains, and then stays in the cluster until it is to serve again."""
    heads: HeadsPlace = HeadsPlace()
    """The place of the instance's KV heads and layers."""
    num_device_pages: Count = 0


class Ordered(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Drain`, `ChangeRole` and `MoveHeads`: the state of the instance now, or the reason of a
    refusal."""

    order: Count
    status: InstanceStatus | None
    """None if no instance has this name, or the helper's."""
    refusal: str = ""


class InstanceList(msgspec.Struct, tag=True, frozen=True):
    """Answer to `ListInstances`."""

    order: Count
    instances: list[InstanceStatus]


class Migrates(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Migrate`: source and destination of the migration that has begun, or why none has."""

    order: Count
    source: str | None = None
    """None if no running request has this id."""
    destination: str | None = None
    refusal: str = ""


OperatorOrder = Drain | ChangeRole | MoveHeads | ListInstances | Migrate
OperatorAnswer = Ordered | InstanceList | Migrates
