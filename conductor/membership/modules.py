"""The orders that move modules of instances to helpers (BanaServe, section 4.1).

Heartbeats report the place of an instance's modules, so that a later Conductor knows the place too.

Owns: which orders are refused, the numbers of orders, how long an order is repeated. Does not know: how
modules move.
"""

import itertools

import msgspec

from conductor.effects import Effect
from conductor.fronts import Fronts
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance, Instances
from mooncake.messages.blocks import KVLayout
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import ModuleKind, ModulesPart, ModulesPlace, PlaceModules
from mooncake.messages.workers import InstanceState, Role

WANTED_BACK_S = 600.0
"""Seconds for which an operator's order to take pages back is repeated while the owner refuses it."""
LONG_TRY_S = 10.0
"""Seconds after which the refusal of an order means that the owner has tried, and preempted requests."""
AGAIN_AFTER_S = 60.0
"""Seconds from the refusal of an order until it is repeated, if the owner has tried for `LONG_TRY_S`."""
_ALL_BACK = ModulesPart()


class Modules:
    """The modules that registered instances have at helpers. `epoch` is the Conductor's epoch."""

    def __init__(self, epoch: int, instances: Instances, view: ClusterView, fronts: Fronts) -> None:
        self._epoch, self._instances, self._view, self._fronts = epoch, instances, view, fronts
        self._numbers = itertools.count(1)

    def why_not(self, owner: Instance, helper: Instance, part: ModulesPart = _ALL_BACK) -> str:
        """Return why a part of `owner` cannot move to `helper`; empty if it can.

        For an empty `part`: return why the modules at the helper cannot move back.
        """
        if owner is helper:
            return f"{owner.name} cannot be its own helper"
        place = place_of(owner)
        if place.is_moving:
            return f"{where(owner)} already"
        if not part:
            return "" if place.helper == helper.name else f"nothing of {owner.name} is at {helper.name}"
        if place.helper:
            back = f"mooncake-serve migrate {owner.name} {place.helper} --back"
            return f"{where(owner)}; take them back first (`{back}`)"
        kind = part.kind
        for instance in (owner, helper):
            if (reason := instance.registration.modules.why_not) != "":
                return f"{kind} neither leave nor come to {instance.name}: {reason}"
            if instance.state is not InstanceState.SERVING:
                return f"{instance.name} is {instance.state.value}"
        if owner.role is Role.PREFILL and kind is not ModuleKind.LAYERS:
            return f"{owner.name} prefills, so that layers of it can be at a helper, and no {kind}"
        if reason := _why_too_many(owner.registration.layout, part):
            return reason
        if not _address_of(owner, helper):
            return (
                f"{owner.name} and {helper.name} are on different hosts, and {helper.name} hosts {kind}"
                " of its own host only; set worker.modules_listen there"
            )
        if place_of(helper).are_elsewhere:
            return f"{where(helper)}, so it cannot be a helper"
        if owners := self.owners_at(owner):
            return f"{owner.name} has modules of {', '.join(owners)} itself"
        return ""

    def order(
        self, owner: Instance, helper: Instance, now_s: float, part: ModulesPart = _ALL_BACK
    ) -> list[Effect]:
        """Return the order that moves a part of `owner` to `helper`.

        For an empty part, it is the order to move all modules back. To be called only if nothing speaks
        against the move (`why_not`).
        """
        address = _address_of(owner, helper)
        order = PlaceModules(self._epoch, next(self._numbers), helper.name, address, part)
        owner.modules_order, owner.modules_ordered_s = order, now_s
        return [Effect(owner.identity, order)]

    def take_back(self, owner: Instance, helper: Instance, now_s: float) -> list[Effect]:
        """Return the messages of an operator's order that moves all modules of `owner` back.

        If the modules are pages, the owner gets no further request that needs them, and `call_back` repeats
        the order for `WANTED_BACK_S`. If `is_wanted_back` was true before, these seconds begin again;
        otherwise `why_not` must have returned an empty text.
        """
        effects = [] if place_of(owner).is_moving else self.order(owner, helper, now_s)
        if owner.modules.part.share:
            effects += self._want_back(owner, now_s + WANTED_BACK_S)
        return effects

    def call_back(self, now_s: float) -> list[Effect]:
        """Order modules back to their owners: those at helpers that are about to leave, and those that
        operators want back.

        The caller should call it about twice a second. An owner may refuse, or may have another order to
        carry out first. After a refusal that took the owner `LONG_TRY_S`, no order is given for
        `AGAIN_AFTER_S`: each such try preempts requests.
        """
        effects: list[Effect] = []
        for owner in self._instances:
            if owner.wanted_back_until_s is not None and owner.wanted_back_until_s <= now_s:
                effects += self._want_back(owner, None)
            is_time = now_s >= owner.call_back_after_s and not place_of(owner).is_moving
            if owner.helper is not None and owner.is_called_back and is_time:
                effects += self.order(owner, owner.helper, now_s)
        return effects

    def _want_back(self, owner: Instance, until_s: float | None) -> list[Effect]:
        owner.wanted_back_until_s = until_s
        return self._resized(owner)

    def _resized(self, owner: Instance) -> list[Effect]:
        """Apply a change of the longest sequence that fits into `owner`. Returns messages to the fronts."""
        self._instances.resized()
        self._view.resized(owner)
        return self._fronts.tell()

    def owners_at(self, helper: Instance) -> list[str]:
        """Return the names of the instances whose modules are at a helper, or are moving there."""
        return [
            owner.name
            for owner in self._instances
            if helper.name in (place_of(owner).helper, owner.modules_order and owner.modules_order.helper)
        ]

    def why_busy(self, instance: Instance) -> str:
        """Return why an instance must keep its role; empty if the role can change.

        An instance must keep its role while its modules are at a helper, or while it hosts modules.
        """
        if place_of(instance).are_elsewhere:
            return where(instance)
        if owners := self.owners_at(instance):
            return f"{instance.name} has modules of {', '.join(owners)}"
        return ""

    def heard(self, instance: Instance, before: Heartbeat | None, now_s: float) -> list[Effect]:
        """Record from a heartbeat where an instance's modules are, and whether an order was carried out.

        Args:
            instance: The owner of the modules. Its `heartbeat` is the one that has just come.
            before: The instance's heartbeat before that; None if there was none.
            now_s: The time.

        Returns:
            Messages to the fronts, if the instance has another number of device pages, another part at its
            helper, or another helper than before.
        """
        order, place = instance.modules_order, instance.modules
        is_told = order is not None and (place.epoch, place.number) == (order.epoch, order.number)
        if is_told and not place.is_moving:
            instance.modules_order = None
            if place.error and now_s - instance.modules_ordered_s >= LONG_TRY_S:
                instance.call_back_after_s = now_s + AGAIN_AFTER_S
        if not place.helper:
            instance.wanted_back_until_s = None
        place_before = ModulesPlace() if before is None else before.modules
        helper_before, instance.helper = instance.helper, self._instances.get(place.helper)
        sizes_before = place_before.num_device_pages, place_before.part, helper_before
        if (place.num_device_pages, place.part, instance.helper) == sizes_before:
            return []
        return self._resized(instance)


def place_of(instance: Instance) -> ModulesPlace:
    """Return the place of an instance's modules.

    Modules count as moving while an order is in flight.
    """
    order, place = instance.modules_order, instance.modules
    if order is None:
        return place
    return ModulesPlace(helper=place.helper, part=place.part, is_moving=True)


def told_place_of(instance: Instance) -> ModulesPlace:
    """Return the place of an instance's modules for operators.

    Modules that an operator wants back count as moving, with the reason why they stay so far.
    """
    if instance.wanted_back_until_s is None:
        return place_of(instance)
    return msgspec.structs.replace(instance.modules, is_moving=True)


def is_wanted_back(owner: Instance, helper: Instance) -> bool:
    """Return whether pages of `owner` are still at `helper`, though an operator has ordered them back."""
    return owner.wanted_back_until_s is not None and owner.modules.helper == helper.name


def where(instance: Instance) -> str:
    """Return a text that tells where an instance's modules are."""
    place = place_of(instance)
    if place.is_moving:
        return f"modules of {instance.name} are moving"
    return f"{place.part.what} of {instance.name} are at {place.helper}"


def _why_too_many(layout: KVLayout, part: ModulesPart) -> str:
    match part.kind:
        case ModuleKind.PAGES:
            return ""
        case ModuleKind.HEADS:
            num = layout.num_kv_heads
            too_many = f"the model has {num} KV heads, of which at most {num - 1} can be elsewhere"
            return too_many if part.num_heads >= num else ""
        case ModuleKind.LAYERS:
            num, layers = layout.num_layers, part.layers
            assert layers is not None
            too_many = f"the model has layers 0:{num}, of which at least one stays"
            return (
                f"{too_many}; {layers} cannot be elsewhere"
                if layers.stop > num or layers.count == num
                else ""
            )


def _address_of(owner: Instance, helper: Instance) -> str:
    """Return the address at which an owner reaches its helper; empty if it cannot reach the helper."""
    support = helper.registration.modules
    return support.socket if host_of(owner) == host_of(helper) else support.endpoint


def host_of(instance: Instance) -> str:
    """Return the id of the host on which an instance's messenger runs."""
    return instance.registration.shards[0].messenger.host_id
