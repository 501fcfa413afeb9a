"""Emptying of instances that drain or switch their role.

No further request is placed on such an instance. Its queued requests are placed on other instances, and its
running prefills end. Its running decodes migrate to instances that have room for them, or end where they are.

Owns: how an instance is emptied. Does not know: why it is emptied, what happens to it then.
"""

from conductor.effects import Effect
from conductor.requests.migrations import Migrations
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.view.decision_stats import MigrationReason
from conductor.view.instances import Emptying, Instance
from mooncake.messages.workers import InstanceState


class Emptier:
    """Takes requests away from instances that drain or switch their role."""

    def __init__(self, requests: Requests, placer: Placer, migrations: Migrations) -> None:
        self._requests, self._placer, self._migrations = requests, placer, migrations
        self._instances, self._view = requests.instances, requests.view
        self._num_released = 0
        """The value of the registry's `num_released` at the latest `tick`."""

    def begin(self, instance: Instance, state: InstanceState, now_s: float) -> Emptying | None:
        """Stop placing requests on the instance, and return its progress. The caller must call `go_on` next.

        If the instance's state forbids it, returns None and changes nothing.
        """
        if not self._instances.begin_emptying(instance, state, now_s):
            return None
        self._view.close(instance)
        return instance.emptying

    def tick(self, now_s: float) -> list[Effect]:
        """Move requests that had no room elsewhere before. The caller should call it about twice a second."""
        effects = [effect for one in self._instances.emptying for effect in self.go_on(one, now_s)]
        self._num_released = self._requests.num_released
        return effects

    def retry(self, now_s: float) -> list[Effect]:
        """Move requests that had no room elsewhere, if a request has left an instance since the last try."""
        return self.tick(now_s) if self._num_released != self._requests.num_released else []

    def go_on(self, instance: Instance, now_s: float) -> list[Effect]:
        """Take requests away from the instance, as far as other instances have room now.

        Migrations to the instance are called off. Its requests that have not begun are placed on other
        instances. Requests that it decodes begin to migrate.
        """
        assert instance.emptying is not None
        effects = self._migrations.call_off(instance)
        num_before = len(instance.requests)
        effects += self._placer.drain(instance, now_s)
        instance.emptying.num_moved += num_before - len(instance.requests)
        switches = instance.state is InstanceState.SWITCHING
        reason = MigrationReason.SWITCH if switches else MigrationReason.DRAIN
        for request_id in list(instance.requests):
            tracked = self._requests.by_id[request_id]
            if tracked.decode != instance.name:
                continue
            destination = self._migrations.best_destination(tracked, now_s)
            if destination is not None:
                effects += self._migrations.begin(tracked, destination, reason, now_s)
        return effects

    def end(self, instance: Instance, now_s: float) -> list[Effect]:
        """Return the instance to service. Does nothing to an instance whose worker was told to end."""
        if not self._instances.serve(instance):
            return []
        self._view.open(instance)
        return self._placer.retry_waiting(now_s)
