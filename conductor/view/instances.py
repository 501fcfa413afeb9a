"""The instances of the cluster, their states, and the requests that are assigned to them.

The load of an instance is the Conductor's own count of assigned requests that have not ended. It is not the
load that heartbeats report.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from conductor.settings import PolicySettings
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import ModulesPlace, PlaceModules
from mooncake.messages.pools import PoolStats
from mooncake.messages.workers import SPOKEN, STAGES, InstanceState, Register, Role

_NEXT = {
    InstanceState.SERVING: frozenset(
        {InstanceState.SWITCHING, InstanceState.DRAINING, InstanceState.RETIRING}
    ),
    InstanceState.SWITCHING: frozenset(
        {InstanceState.SERVING, InstanceState.DRAINING, InstanceState.RETIRING}
    ),
    InstanceState.DRAINING: frozenset({InstanceState.SERVING, InstanceState.RETIRING, InstanceState.RETIRED}),
    InstanceState.RETIRING: frozenset({InstanceState.RETIRED}),
    InstanceState.RETIRED: frozenset[InstanceState](),
}
_MOST_SHOWN = 80
"""The largest number of characters of an unknown name that a message shows."""


@dataclass(slots=True)
class Emptying:
    """The progress of an instance that drains or switches its role."""

    began_s: float
    next_role: Role | None = None
    """The role to which the instance switches; None if it drains."""
    is_forced: bool = False
    """Whether the instance switches even if no other instance is left for its stage."""
    leaves: bool = False
    """Whether the instance leaves when it is empty."""
    is_for_good: bool = False
    """Whether an operator has ordered the instance to leave."""
    num_moved: int = 0
    """Requests that have moved to other instances."""
    num_blocks_left: int = 0
    """Blocks that are yet to be copied to other instances."""


@dataclass(slots=True)
class Instance:
    """One life of one instance, from its registration to its loss."""

    registration: Register
    identity: bytes
    last_seen_s: float
    heartbeat: Heartbeat | None = None
    role: Role = field(init=False)
    """The present role: the registered one, until the Conductor gives the instance another."""
    state: InstanceState = InstanceState.SERVING
    emptying: Emptying | None = None
    """The progress of draining or switching; None exactly while `state` is SERVING."""
    requests: dict[str, int] = field(default_factory=dict)
    """The prompt length in tokens of each request that the instance has, by the request's id.

    The instance has a request as its prefill instance, its decode instance, or the destination of its
    migration.
    """
    modules_order: PlaceModules | None = None
    """The latest order that moves the instance's modules, until a heartbeat reports the result."""
    modules_ordered_s: float = 0.0
    """The time of the latest order that moves the instance's modules."""
    call_back_after_s: float = 0.0
    """The time before which no order to move modules back is repeated."""
    helper: "Instance | None" = None
    """The registered instance that hosts modules of this instance, as of the latest heartbeat.

    None without a helper.
    """
    wanted_back_until_s: float | None = None
    """The time until which an operator's order to move pages back is repeated; None without such an order."""

    def __post_init__(self) -> None:
        self.role = self.registration.role

    @property
    def name(self) -> str:
        """The instance's name, which stays the same over restarts, unlike the identity."""
        return self.registration.instance

    @property
    def version(self) -> int:
        """The newest protocol version that Conductor and instance both speak. No newer message is sent."""
        version = SPOKEN.common(self.registration.versions)
        assert version is not None, "it was not refused"
        return version

    @property
    def kind(self) -> tuple[str, str, int]:
        """The properties that instances of equal speed share: device, engine, number of stages or ranks."""
        registration = self.registration
        return registration.device, registration.engine, len(registration.shards)

    @property
    def num_assigned_tokens(self) -> int:
        """The prompt tokens of all assigned requests."""
        return sum(self.requests.values())

    @property
    def max_sequence_blocks(self) -> int:
        """Blocks of the longest sequence that fits into the idle instance.

        A sequence must fit both with the modules where they are and with all modules back. There is one
        exception: if a helper has device pages of a decode instance, a sequence may be so long that it needs
        these pages. The pages then stay at the helper until the sequence has ended. So no such sequence is
        taken while the pages are to come back. A prompt must always fit without the helper
        (`max_prompt_blocks`).
        """
        capacity = self.registration.capacity
        most = min(capacity.num_pool_pages, self.num_device_pages)
        if self.modules.part.share and self.role is Role.DECODE and not self.is_called_back:
            return most
        return min(most, capacity.num_device_pages)

    @property
    def is_called_back(self) -> bool:
        """Whether the modules at the helper are to come back.

        They are if the helper takes no new requests (it drains, leaves or switches its role), or if an
        operator wants them back.
        """
        if self.wanted_back_until_s is not None:
            return True  # even while the helper is not registered
        return self.helper is not None and self.helper.state is not InstanceState.SERVING

    @property
    def max_prompt_blocks(self) -> int:
        """Blocks of the longest prompt that the idle instance can compute."""
        return min(self.max_sequence_blocks, self.registration.capacity.num_device_pages)

    def max_blocks(self, stage: Role) -> int:
        """Return the blocks of the longest sequence for which the idle instance can do a stage."""
        return self.max_prompt_blocks if stage is Role.PREFILL else self.max_sequence_blocks

    def room_blocks(self, pool: PoolStats) -> int:
        """Return the blocks of the longest sequence that fits when all assigned requests have ended.

        The pages of `pool` that pins and pool clients use are subtracted.
        """
        layout = self.registration.layout
        num_assigned = sum(layout.num_blocks(num_tokens) for num_tokens in self.requests.values())
        num_used_by_others = max(0, pool.num_used + pool.num_quarantined - num_assigned)
        return min(self.max_sequence_blocks, pool.num_pages - num_used_by_others)

    @property
    def modules(self) -> ModulesPlace:
        """The place of the instance's modules, as of the latest heartbeat.

        If the instance's session began under an earlier Conductor, its modules count as moving until the
        first heartbeat: they may be at a helper.
        """
        if self.heartbeat is not None:
            return self.heartbeat.modules
        return ModulesPlace(is_moving=self.registration.epoch != 0)

    @property
    def num_device_pages(self) -> int:
        """The number of device pages, which changes as modules leave or come back."""
        now = self.modules.num_device_pages
        return self.registration.capacity.num_device_pages if now is None else now

    @property
    def num_pages_at_helper(self) -> int:
        """The number of device pages that a helper has for this instance.

        Only full pages of the instance's running requests can be there. So a request that migrates to the
        instance gets none of these pages in advance.
        """
        if not self.modules.part.share:
            return 0
        return max(0, self.num_device_pages - self.registration.capacity.num_device_pages)

    def shares_cores(self, other: "Instance") -> bool:
        """Return whether the instances share CPU cores on which each computes while the other idles."""
        ours, theirs = self.registration, other.registration
        if ours.idle_cores.isdisjoint(theirs.idle_cores):
            return False
        return ours.shards[0].messenger.host_id == theirs.shards[0].messenger.host_id

    def can_hold(self, num_tokens: int, stage: Role) -> bool:
        """Return whether the idle instance can do a stage of a sequence of `num_tokens`."""
        return self.registration.layout.num_blocks(num_tokens) <= self.max_blocks(stage)


class Instances:
    """All registered instances by name. At most one life of a name is registered.

    A `stage` is one of `STAGES`. `settings` tells which roles can do a stage.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._by_name: dict[str, Instance] = {}
        self._lost: dict[str, tuple[Instance, float]] = {}  # each with the time until which it is expected
        self._emptying: dict[str, Instance] = {}
        self._all_expected_until_s: float | None = None
        self._num_before = 0
        self.num_changes = 0
        """The number of times that an instance has come or gone."""
        self._largest: dict[Role, Instance | None] = {}  # cached results of `largest`

    def add(self, instance: Instance) -> None:
        """Add a life of an instance. An earlier life of the name must have been removed."""
        assert instance.name not in self._by_name
        self._lost.pop(instance.name, None)
        self._by_name[instance.name] = instance
        self._changed()

    def remove(self, name: str, until_s: float) -> None:
        """Remove a life that has ended; the next life is expected until `until_s`."""
        lost = self._by_name.pop(name)
        lost.heartbeat = None  # in its next life no module is at a helper
        self._lost[name] = (lost, until_s)
        self._emptying.pop(name, None)
        self._changed()

    def expect(self, name: str, until_s: float) -> None:
        """Expect the next life of a lost instance until `until_s`, after that life has announced itself.

        An instance of an unknown name may have been lost under an earlier Conductor. So if instances of an
        earlier Conductor are still expected, the wait for all of them then lasts until `until_s` at least.
        """
        if name in self._lost:
            self._lost[name] = (self._lost[name][0], until_s)
        elif name not in self._by_name and self._all_expected_until_s is not None:
            self._all_expected_until_s = max(self._all_expected_until_s, until_s)

    def begin_emptying(self, instance: Instance, state: InstanceState, now_s: float) -> bool:
        """Begin to drain an instance, or to switch its role. Returns False if its state forbids it.

        An instance that is already being emptied keeps its progress.
        """
        if state not in _NEXT[instance.state]:
            return False
        before = instance.emptying or Emptying(now_s)
        instance.state, instance.emptying = state, replace(before, next_role=None)
        self._emptying[instance.name] = instance
        self._largest.clear()
        return True

    def retire(self, instance: Instance) -> bool:
        """Record that an instance is allowed to end. Returns False if its state forbids it."""
        if InstanceState.RETIRED not in _NEXT[instance.state]:
            return False
        instance.state = InstanceState.RETIRED
        return True

    def serve(self, instance: Instance, role: Role | None = None) -> bool:
        """Return an instance to service, in another `role` if given.

        Returns False if its state forbids it.
        """
        if InstanceState.SERVING not in _NEXT[instance.state]:
            return False
        instance.state, instance.emptying = InstanceState.SERVING, None
        instance.role = role or instance.role
        del self._emptying[instance.name]
        self._largest.clear()
        return True

    def expect_all(self, num_instances: int, until_s: float) -> None:
        """Expect `num_instances` instances of an earlier Conductor until `until_s`.

        Until then no stage counts as lacking.
        """
        self._num_before, self._all_expected_until_s = num_instances, until_s

    @property
    def num_expected(self) -> int:
        """The number of registered instances, or of an earlier Conductor's instances if those are more.

        The latter count only while they are expected back.
        """
        return max(len(self), 0 if self._all_expected_until_s is None else self._num_before)

    def lacks(self, stage: Role) -> bool:
        """Return whether no instance for a stage is registered or expected."""
        return self.largest(stage) is None and self._all_expected_until_s is None

    @property
    def emptying(self) -> list[Instance]:
        """The instances that drain or switch their role, or have retired and are not removed yet."""
        return list(self._emptying.values())

    def resized(self) -> None:
        """Forget derived sizes. The caller has changed the number of pages of an instance."""
        self._largest.clear()

    def _changed(self) -> None:
        self.num_changes += 1
        self._largest.clear()

    def forget_lost(self, now_s: float) -> None:
        """Stop expecting lost instances that should have been back by now."""
        if self._all_expected_until_s is not None and self._all_expected_until_s < now_s:
            self._all_expected_until_s = None
        kept = {name: lost for name, lost in self._lost.items() if lost[1] >= now_s}
        if len(kept) < len(self._lost):
            self._lost = kept
            self._largest.clear()

    def largest(self, stage: Role) -> Instance | None:
        """Return the instance for a stage that can hold the longest sequence; None if there is none.

        Serving instances count, and lost instances that may return.
        """
        if stage not in self._largest:
            lost = [instance for instance, _ in self._lost.values() if self._can(instance, stage)]
            expected = self.serving(stage) + lost
            self._largest[stage] = max(
                expected, key=lambda instance: instance.max_blocks(stage), default=None
            )
        return self._largest[stage]

    def _can(self, instance: Instance, stage: Role) -> bool:
        return self._settings.can(instance.role, stage)

    def get(self, name: str | None) -> Instance | None:
        """Return the registered instance of this name; None if there is none."""
        return self._by_name.get(name) if name is not None else None

    def by_identity(self, identity: bytes) -> Instance | None:
        """Return the instance with this socket identity; None if another life or none is registered."""
        instance = self._by_name.get(identity.decode(errors="replace").rpartition("#")[0])
        return instance if instance is not None and instance.identity == identity else None

    def able(self, stage: Role) -> list[Instance]:
        """Return the instances whose role can do a stage."""
        return [instance for instance in self._by_name.values() if self._can(instance, stage)]

    def serving(self, stage: Role) -> list[Instance]:
        """Return the instances whose role can do a stage and that take new requests."""
        return [instance for instance in self.able(stage) if instance.state is InstanceState.SERVING]

    def why_none(self, stage: Role) -> str:
        """Return the message for clients that says why no instance for a stage takes requests."""
        able = self.able(stage)
        if not able:
            return f"no {stage.value} instance is ready"
        switches = any(instance.state is InstanceState.SWITCHING for instance in able)
        return f"all {stage.value} instances are draining{' or switching their role' if switches else ''}"

    def why_unknown(self, name: str) -> str:
        """Return the message for operators that says that no instance of this name is registered."""
        names = sorted(self._by_name)
        verb = "is" if len(names) == 1 else "are"
        return f"no instance {name[:_MOST_SHOWN]!r} is registered; there {verb} {', '.join(names) or 'none'}"

    def stage_lost_without(self, instance: Instance, role: Role | None = None) -> Role | None:
        """Return a stage that would have no serving instance if `instance` left, or switched to `role`.

        None if there is no such stage.
        """
        for stage in STAGES:
            is_kept = role is not None and self._settings.can(role, stage)
            if self._can(instance, stage) and not is_kept and self.serving(stage) in ([], [instance]):
                return stage
        return None

    def lacks_stage(self, role: Role, other: Role) -> bool:
        """Return whether `role` can do a stage that `other` cannot, and that no instance does now.

        Instances that are expected to register count as if they did the stage now.
        """
        return any(
            self._settings.can(role, stage) and not self._settings.can(other, stage) and self.lacks(stage)
            for stage in STAGES
        )

    def silent_since(self, deadline_s: float) -> list[Instance]:
        """Return the instances that were last heard from before `deadline_s`."""
        return [instance for instance in self._by_name.values() if instance.last_seen_s < deadline_s]

    def max_sequence_blocks(self) -> int:
        """Return the blocks of the longest sequence that a serving or expected pair can hold; 0 if none."""
        largest = [(stage, self.largest(stage)) for stage in STAGES]
        return min(0 if instance is None else instance.max_blocks(stage) for stage, instance in largest)

    def __len__(self) -> int:
        """Return the number of registered instances."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_name.values())
