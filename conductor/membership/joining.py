"""Instances that join and are lost, and the effects on their requests.

Owns: an instance's way into the cluster, and its end. Does not know: sockets, how a request is placed, how an
instance drains (`conductor.membership.leaving`).
"""

from conductor.effects import Effect
from conductor.fronts import Fronts, why_unfit
from conductor.membership.roles import Roles
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.requests.resumption import Resumption
from conductor.requests.worker_reports import WorkerReports
from conductor.view.instances import Instance
from mooncake.config.profile import why_other_device
from mooncake.messages.workers import (
    InstanceState,
    Register,
    Registered,
    RegisterRefused,
    Returning,
    ReturnNoted,
)


class Membership:
    """The membership of instances in the registry's cluster.

    All of them have the model with this fingerprint, and compute on `profiled_device` unless it is None.
    """

    def __init__(
        self,
        fingerprint: str,
        profiled_device: str | None,
        fronts: Fronts,
        requests: Requests,
        placer: Placer,
        reports: WorkerReports,
        resumption: Resumption,
        roles: Roles,
    ) -> None:
        self._fingerprint, self._profiled_device, self._fronts = fingerprint, profiled_device, fronts
        self._requests, self._placer, self._reports, self._roles = requests, placer, reports, roles
        self._resumption = resumption
        self._instances, self._view, self._limits = requests.instances, requests.view, requests.limits

    # -- coming -------------------------------------------------------------------------------------

    def register(self, sender: bytes, register: Register, now_s: float) -> list[Effect]:
        """Register an instance, or refuse it. Returns the answer and what follows from it."""
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
            effects = self.drop([earlier] if earlier is not None else [], "has lost its connection", now_s)
            refusal = "its connection to the conductor broke, which may have swallowed orders"
            return [*effects, Effect(sender, RegisterRefused(refusal, retryable=True))]
        instance = Instance(register, sender, last_seen_s=now_s)
        registered = Registered(self._requests.epoch, instance.version)
        if earlier is not None and earlier.identity == sender:
            earlier.last_seen_s = now_s
            # It had not received the first answer yet.
            return [Effect(sender, registered), *self._roles.ordered_again(earlier, register)]
        effects = self.drop([earlier] if earlier is not None else [], "has restarted", now_s)
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
        """Record that the next life of an instance is about to register, and drop the one before."""
        effects = [Effect(sender, ReturnNoted())]
        instance = self._instances.get(message.instance)
        if instance is not None and instance.registration.incarnation < message.incarnation:
            effects += self.drop([instance], "has died", now_s)
        self._instances.expect(message.instance, now_s + self._limits.placement_timeout_s)
        effects += self._reports.on_returning(message.instance, message.failed_in, now_s)
        return effects + self._placer.retry_waiting(now_s)

    # -- going --------------------------------------------------------------------------------------

    def drop(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """Remove instances, all at once, so that no request is placed on an instance that is removed next."""
        for instance in lost:
            if instance.state is InstanceState.SWITCHING:
                self._roles.count_given_up()
            self._instances.remove(instance.name, now_s + self._limits.return_grace_s)
            self._view.remove(instance)
        self._resumption.lose(lost)
        effects = self._fronts.tell() if lost else []
        return effects + self._reports.lose(lost, reason, now_s)


def _is_repeated_over_another(earlier: Instance | None, sender: bytes, register: Register) -> bool:
    """Return whether an instance registers again because the connection of its registration broke."""
    return (
        earlier is not None
        and earlier.identity == sender
        and earlier.registration.num_connections != register.num_connections
    )
