"""Instances that join the cluster: their registration and its effects.

Owns: an instance's way into the cluster. Does not know: sockets, how a request is placed, how an instance
leaves (`conductor.membership.leaving`) or is lost (`conductor.membership.losses`).
"""

from conductor.effects import Effect
from conductor.fronts import Fronts, why_unfit
from conductor.membership.losses import Losses
from conductor.membership.roles import Roles
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.requests.resumption import Resumption
from conductor.requests.worker_reports import WorkerReports
from conductor.view.instances import Instance
from mooncake.config.profile import why_other_device
from mooncake.messages.workers import Register, Registered, RegisterRefused, Returning, ReturnNoted


class Joining:
    """Registers instances, or refuses them.

    Args:
        fingerprint: The model's fingerprint, which each instance must have.
        profiled_device: The device on which each instance must compute; None for any device.
        fronts: The fronts, which get messages about new instances.
        requests: The registry.
        placer: The component that places waiting requests on a new instance.
        reports: The handlers of workers' reports.
        losses: The component that removes the previous life of an instance.
        resumption: The component that continues requests of an earlier Conductor.
        roles: The component that knows the roles that instances were given.
    """

    def __init__(
        self,
        fingerprint: str,
        profiled_device: str | None,
        fronts: Fronts,
        requests: Requests,
        placer: Placer,
        reports: WorkerReports,
        losses: Losses,
        resumption: Resumption,
        roles: Roles,
    ) -> None:
        self._fingerprint, self._profiled_device, self._fronts = fingerprint, profiled_device, fronts
        self._requests, self._placer, self._reports, self._roles = requests, placer, reports, roles
        self._losses, self._resumption = losses, resumption
        self._instances, self._view, self._limits = requests.instances, requests.view, requests.limits

    def register(self, sender: bytes, register: Register, now_s: float) -> list[Effect]:
        """Register an instance, or refuse it. Returns the answer and the messages that follow from it."""
        earlier = self._instances.get(register.instance)
        if earlier is not None and earlier.registration.incarnation > register.incarnation:
            refusal = f"a newer {register.instance} is registered; give each instance its own --instance"
            return [Effect(sender, RegisterRefused(refusal, retryable=True))]
        unfit = why_unfit(register.instance, register.versions, register.fingerprint, self._fingerprint)
        if unfit is None and self._profiled_device is not None:
            unfit = why_other_device(self._profiled_device, register.instance, register.device)
        if unfit is not None:
            return [Effect(sender, RegisterRefused(unfit))]
        if register.epoch == self._requests.epoch or _is_repeated_over_another(earlier, sender, register):
            gone = [earlier] if earlier is not None else []
            effects = self._losses.drop(gone, "has lost its connection", now_s)
            refusal = "its connection to the conductor broke, which may have swallowed orders"
            return [*effects, Effect(sender, RegisterRefused(refusal, retryable=True))]
        instance = Instance(register, sender, last_seen_s=now_s)
        registered = Registered(self._requests.epoch, instance.version)
        if earlier is not None and earlier.identity == sender:
            earlier.last_seen_s = now_s
            # The instance had not received the first answer when it registered again.
            return [Effect(sender, registered), *self._roles.ordered_again(earlier, register)]
        effects = self._losses.drop([earlier] if earlier is not None else [], "has restarted", now_s)
        ordered = self._roles.registered(instance)
        try:
            self._view.add(instance, now_s)
        except ValueError as error:
            refusal = f"{error}; give each instance its own --instance"
            return [*effects, Effect(sender, RegisterRefused(refusal, retryable=True))]
        self._instances.add(instance)
        self._requests.suspicion.instance_returned(instance.name)
        effects += [Effect(sender, registered), *ordered]
        if register.epoch:
            self._resumption.begin(0, now_s)
        effects += self._resumption.registered(instance, register.held, now_s)
        effects += self._placer.retry_waiting(now_s)
        return effects + self._fronts.tell()

    def returning(self, sender: bytes, message: Returning, now_s: float) -> list[Effect]:
        """Record that the next life of an instance is about to register, and drop the previous life."""
        effects = [Effect(sender, ReturnNoted())]
        instance = self._instances.get(message.instance)
        if instance is not None and instance.registration.incarnation < message.incarnation:
            effects += self._losses.drop([instance], "has died", now_s)
        self._instances.expect(message.instance, now_s + self._limits.placement_timeout_s)
        effects += self._reports.on_returning(message.instance, message.failed_in, now_s)
        return effects + self._placer.retry_waiting(now_s)


def _is_repeated_over_another(earlier: Instance | None, sender: bytes, register: Register) -> bool:
    """Return whether an instance repeats its registration over a new connection: the first one broke."""
    return (
        earlier is not None
        and earlier.identity == sender
        and earlier.registration.num_connections != register.num_connections
    )
