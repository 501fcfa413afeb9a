"""Lost instances: they are removed from the registry and the view, and their requests go on elsewhere.

Owns: what is removed with a lost instance. Does not know: how a loss is noticed (`tick`, `peer_gone` and
`Leave` in `conductor.policy`, a new life in `conductor.membership.joining`), how a request is placed.
"""

from conductor.effects import Effect
from conductor.fronts import Fronts
from conductor.membership.roles import Roles
from conductor.requests.registry import Requests
from conductor.requests.resumption import Resumption
from conductor.requests.worker_reports import WorkerReports
from conductor.view.instances import Instance
from mooncake.messages.workers import InstanceState


class Losses:
    """Removes lost instances from the registry's cluster."""

    def __init__(
        self,
        requests: Requests,
        reports: WorkerReports,
        resumption: Resumption,
        roles: Roles,
        fronts: Fronts,
    ) -> None:
        self._reports, self._resumption, self._roles, self._fronts = reports, resumption, roles, fronts
        self._instances, self._view, self._limits = requests.instances, requests.view, requests.limits

    def drop(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """Remove lost instances and place their requests again. Returns the messages that follow.

        All lost instances are removed before the first request is placed, so that no request is placed on one
        of them.

        Args:
            lost: The lost instances.
            reason: The text that follows an instance's name in the errors of its requests.
            now_s: The time.
        """
        for instance in lost:
            if instance.state is InstanceState.SWITCHING:
                self._roles.count_given_up()
            self._instances.remove(instance.name, now_s + self._limits.return_grace_s)
            self._view.remove(instance)
        self._resumption.lose(lost)
        effects = self._fronts.tell() if lost else []
        return effects + self._reports.lose(lost, reason, now_s)
