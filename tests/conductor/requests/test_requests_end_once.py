"""Random messages, losses, moves and times: every request ends once."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.effects import Effect, ToConductor
from conductor.policy import Conductor
from conductor.requests.lifecycle import PLACED, RequestState, TrackedRequest
from conductor.requests.migration import MigrationStep
from conductor.settings import Limits, PolicySettings, SLOs
from conductor.view.instances import Instance
from conductor.view.rejection import Reason
from mooncake.bus.zeromq import peer_identity
from mooncake.config.policies import Overload
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Accepted,
    Cancel,
    Continue,
    Failed,
    FrontHello,
    InFlight,
    Rejected,
    Resume,
    Submit,
    Unknown,
)
from mooncake.messages.heartbeats import DecodeLoad, Heartbeat
from mooncake.messages.kv_events import KVStored
from mooncake.messages.migration import HandedOver, HandOver, PreCopied, PreCopy, Prepare, Prepared, TakeOver
from mooncake.messages.operators import ChangeRole, Drain, Migrate
from mooncake.messages.pools import Tier
from mooncake.messages.requests import FinishReason, Held, HeldStep, Ref, Request
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    STAGES,
    Decode,
    DecodeRefused,
    Finished,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    Returning,
    Role,
    WorkFailed,
)
from tests.conductor.small_cluster import (
    EPOCH,
    FRONT,
    GRANT,
    LAYOUT,
    POOL,
    registration,
    request,
)
from tests.examples import num_examples

ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
Order = Reserve | Prefill | Decode | PreCopy | Prepare | HandOver | TakeOver


def _request_of(effect: Effect) -> str:
    assert isinstance(effect.message, Order)
    return effect.message.ref.request_id


def _held_by(instance: Instance, tracked: TrackedRequest) -> list[Held]:
    """What an instance has of a request."""
    steps = []
    if tracked.state is RequestState.PREFILLING and tracked.prefill == instance.name:
        steps.append(HeldStep.PROMPT)
    if tracked.state in PLACED and tracked.decode == instance.name:
        is_decoded = tracked.state is RequestState.DECODING
        steps.append(HeldStep.DECODING if is_decoded else HeldStep.RESERVED)
    return [Held(tracked.ref, step) for step in steps]


class RequestsEndOnce(RuleBasedStateMachine):
    """No order of messages, losses and returns loses a request, ends it twice, or leaves a load behind it."""

    decided_by = PolicySettings()
    profiled: tuple[Costs, Costs] | None = None
    # SLOs that some requests would miss: whom the generic costs reject is told so.
    limits = Limits(
        max_running_requests=12,
        ttft_slo_s=0.004,
        tbt_slo_s=0.0053,
        slo_classes={"patient": SLOs(5.0, 0.0052)},
        max_waiting=3,
    )

    def __init__(self) -> None:
        super().__init__()
        self.epoch = EPOCH
        self.conductor = Conductor(EPOCH, "model", self.limits, self.decided_by, self.profiled)
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
        for name, role in ROLES.items():
            self.conductor.handle(peer_identity(name, 1), registration(name, role), 0.0)
        self.now_s = 0.0
        self.incarnation = 1
        self.open: set[str] = set()
        self.orders: list[Effect] = []
        self.instance_of: dict[Ref, bytes] = {}
        """Decode instances by the attempts that were ordered from them."""
        self.count = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.peer == FRONT and isinstance(effect.message, Failed | Rejected):
                assert effect.message.request_id in self.open
                self.open.remove(effect.message.request_id)
            if isinstance(effect.message, Order):
                self.orders.append(effect)
            match effect.message:
                case Reserve(ref=ref):
                    assert ref not in self.instance_of
                    self.instance_of[ref] = effect.peer
                case Prepare(ref=ref):
                    assert self.instance_of.setdefault(ref, effect.peer) == effect.peer
                case PreCopy(ref=ref) | HandOver(ref=ref) | TakeOver(ref=ref):
                    assert self.instance_of[ref] == effect.peer

    @rule(
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        slo=st.sampled_from(["", "patient"]),
        num_choices=st.sampled_from([1, 1, 2, 5]),
    )
    def submit(self, priority: int, tenant: str, slo: str, num_choices: int = 1) -> None:
        self.count += 1
        order = msgspec.structs.replace(
            request(f"r{self.count}", 9 + 40 * (self.count % 3)),
            priority=priority,
            tenant=tenant,
            slo_class=slo,
            answer_id=f"answer {self.count}",
        )
        self.submit_choice(order, num_choices)

    def submit_choice(self, order: Request, num_choices: int) -> None:
        self.open.add(order.request_id)
        effects = self.conductor.handle(FRONT, Submit(order, num_choices=num_choices), self.now_s)
        self.take(effects)
        is_accepted = Effect(FRONT, Accepted(order.request_id)) in effects
        assert is_accepted is (num_choices > 1 and order.request_id in self.open)

    @rule(data=st.data())
    def submit_further(self, data: st.DataObject) -> None:
        """Submit one more choice of an answer, whether the Conductor expects it or not."""
        if self.open:
            first = self.conductor.requests[data.draw(st.sampled_from(sorted(self.open)))].request
            self.count += 1
            self.submit_choice(msgspec.structs.replace(first, request_id=f"r{self.count}"), 1)

    @rule(name=st.sampled_from([*ROLES]), num_blocks=st.integers(1, 4))
    def store(self, name: str, num_blocks: int) -> None:
        self.conductor.prefixes.apply(name, [KVStored(Tier.DRAM, [b"k" * 16] * num_blocks)])

    @rule(data=st.data(), outcome=st.sampled_from(["well", "retry", "fail", "refuse", "lost"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        if not self.orders:
            return
        effect = data.draw(st.sampled_from(self.orders))
        if outcome != "well" or not isinstance(effect.message, Reserve):
            self.orders.remove(effect)
        order = effect.message
        assert isinstance(order, Order)
        if outcome in ("retry", "fail"):
            self.hear(effect.peer, WorkFailed(order.ref, "x", outcome == "retry"))
        elif outcome == "refuse":
            self.hear(effect.peer, DecodeRefused(order.ref, "slow", 2, 0.2))
        elif outcome == "well":
            self.do_well(effect.peer, order, data.draw(st.integers(1, 40)))

    def do_well(self, peer: bytes, order: Order, num_output_tokens: int) -> None:
        output = [1] * num_output_tokens
        before = self.conductor.num_open
        match order:
            case Reserve(ref=ref):
                self.hear(peer, Reserved(ref, GRANT))
            case Prefill(ref=ref):
                self.hear(peer, Prefilled(ref, 1, 0))
            case PreCopy(ref=ref):
                self.hear(peer, PreCopied(ref, output))
            case Prepare(ref=ref, request=moving):
                self.hear(peer, Prepared(ref, len(moving.token_ids)))
            case HandOver(ref=ref):
                self.hear(peer, HandedOver(ref, output))
            case Decode(ref=ref) | TakeOver(ref=ref):
                self.hear(peer, Finished(ref, FinishReason.STOP, 1))
                if self.conductor.num_open < before:
                    self.open.remove(ref.request_id)

    def hear(self, sender: bytes, message: ToConductor) -> None:
        self.take(self.conductor.handle(sender, message, self.now_s))

    @rule(data=st.data(), lacks_tokens=st.booleans())
    def go_on(self, data: st.DataObject, lacks_tokens: bool) -> None:
        """A front says how far an output has come, as it was asked, or as tokens have been lost."""
        if self.open:
            tracked = self.conductor.requests[data.draw(st.sampled_from(sorted(self.open)))]
            output = tracked.request.output or [1]
            request = tracked.request.continued(output, LAYOUT.block_size)
            self.hear(FRONT, Continue(request, tracked.ref.attempt if lacks_tokens else None))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            request_id = data.draw(st.sampled_from(sorted(self.open)))
            self.take(self.conductor.handle(FRONT, Cancel(request_id), self.now_s))
            self.open.remove(request_id)

    @rule(data=st.data())
    def lose_the_connection(self, data: st.DataObject) -> None:
        """A cancellation and a request are swallowed; two heartbeats come."""
        gone = data.draw(st.sampled_from(sorted(self.open))) if self.open else None
        self.open.discard(gone or "")
        for _ in range(2):
            effects = self.conductor.handle(FRONT, InFlight([*self.open, "swallowed"]), self.now_s)
            self.take(effects)
            assert Effect(FRONT, Unknown(["swallowed"])) in effects

    @rule(name=st.sampled_from([*ROLES]), registers=st.booleans())
    def restart(self, name: str, registers: bool) -> None:
        if registers:
            self.incarnation += 1
            identity = peer_identity(name, self.incarnation)
            message = registration(name, ROLES[name], self.incarnation)
            self.take(self.conductor.handle(identity, message, self.now_s))
        elif (instance := self.conductor.instances.get(name)) is not None:
            self.take(self.conductor.peer_gone(instance.identity, self.now_s))

    @rule(data=st.data(), num_instances=st.integers(0, len(ROLES)))
    def succeed(self, data: st.DataObject, num_instances: int) -> None:
        """Another Conductor takes over, and hears of what runs in any order; some of it is lost."""
        before, self.epoch = self.conductor, self.epoch + 1
        self.conductor = Conductor(self.epoch, "model", self.limits, self.decided_by, self.profiled)
        self.hear(FRONT, FrontHello(PROTOCOL_VERSION, "model", self.epoch - 1, num_instances))
        told: list[tuple[bytes, ToConductor]] = [
            (FRONT, Resume(tracked.request, 1.0)) for tracked in before.requests.values()
        ]
        for instance in before.instances:
            held = [held for tracked in before.requests.values() for held in _held_by(instance, tracked)]
            kept = data.draw(st.lists(st.sampled_from(held), unique_by=lambda one: one.ref)) if held else []
            message = msgspec.structs.replace(
                instance.registration, role=instance.role, epoch=self.epoch - 1, held=kept
            )
            told.append((instance.identity, message))
        for sender, message in data.draw(st.permutations(told)):
            is_back = sender == FRONT or data.draw(st.integers(0, 3)) > 0
            if is_back:
                self.hear(sender, message)

    @rule(name=st.sampled_from([*ROLES]), is_wanted=st.booleans(), stays=st.booleans())
    def drain(self, name: str, is_wanted: bool, stays: bool) -> None:
        order = Drain(1, name, is_wanted, force=True, stays=stays)
        self.take(self.conductor.handle(FRONT, order, self.now_s))

    @rule(name=st.sampled_from([*ROLES]), role=st.sampled_from(STAGES))
    def change_role(self, name: str, role: Role) -> None:
        self.take(self.conductor.handle(FRONT, ChangeRole(1, name, role, force=True), self.now_s))

    @rule(data=st.data(), name=st.sampled_from([*ROLES]))
    def report(self, data: st.DataObject, name: str) -> None:
        """A process of an instance is back, and says in whose pass the one before failed."""
        self.incarnation += 1
        failed_in = data.draw(st.sets(st.sampled_from(sorted(self.open)), max_size=2)) if self.open else set()
        message = Returning(name, self.incarnation, [Ref(EPOCH, request_id, 1) for request_id in failed_in])
        self.hear(peer_identity(f"{name}/returning", self.incarnation), message)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), self.now_s)
        self.take(self.conductor.tick(self.now_s))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.conductor.requests) == self.open
        for instance in self.conductor.instances:
            assert set(instance.requests) <= self.open
        for tracked in self.conductor.requests.values():
            assert (tracked.assignment is not None) is (tracked.state in PLACED)
            assert (tracked.migration is not None) is (
                tracked.request_id in self.conductor.migrations.in_progress
            )
            assert tracked.migration is None or tracked.state is RequestState.DECODING
        for instance in self.conductor.instances:
            num_migrations = sum(
                instance in (migration.destination.instance, migration.destination.source)
                for tracked in self.conductor.requests.values()
                if (migration := tracked.migration) is not None
            )
            assert num_migrations <= self.limits.max_migrations

    def teardown(self) -> None:
        for request_id in list(self.open):
            self.take(self.conductor.handle(FRONT, Cancel(request_id), self.now_s))
        all_there_is = Submit(request("last"), num_choices=self.limits.max_running_requests)
        effects = self.conductor.handle(FRONT, all_there_is, self.now_s)
        rejected = [effect.message for effect in effects if isinstance(effect.message, Rejected)]
        assert Reason.TOO_MANY not in [message.reason for message in rejected], "a choice is still announced"

    @invariant()
    def loads_are_those_of_open_requests(self) -> None:
        loads, transfers = self.conductor.view.loads, self.conductor.view.transfers
        assert loads.num_slots <= len(ROLES)
        for instance in self.conductor.instances:
            slot = self.conductor.prefixes.slots[instance.name]
            here = [self.conductor.requests[request_id] for request_id in instance.requests]
            num_inlined = sum(
                tracked.prefill == tracked.decode == instance.name
                and tracked.state is not RequestState.DECODING
                for tracked in here
            )
            assert loads.num_assigned[slot] == len(here) + num_inlined, "a prompt counts, and what is decoded"
        states = [tracked.state for tracked in self.conductor.requests.values()]
        assert self.conductor.num_queued == states.count(RequestState.QUEUED)
        num_placed = sum(state in PLACED for state in states)
        migrations = [tracked.migration for tracked in self.conductor.requests.values() if tracked.migration]
        num_coming = sum(migration.step is not MigrationStep.STRANDED for migration in migrations)
        assert loads.batch_size.sum() == num_placed + num_coming
        assert loads.num_decoding.sum() == states.count(RequestState.DECODING)
        if not num_placed:
            for array in (loads.queued_s, loads.num_kv_tokens, loads.num_decoding_tokens):
                assert not array.any()
            assert not transfers.ordered_bytes.any()


class RequestsEndOnceWithTheBaseline(RequestsEndOnce):
    """Section 7.1: decode's load is checked when prefill has ended."""

    decided_by = PolicySettings(overload=Overload.BASELINE)


class RequestsEndOnceWhileTheyMove(RequestsEndOnce):
    """Requests without SLOs, which are decoded at once, and move between two instances."""

    limits = Limits(max_running_requests=12, max_migrations=2)

    @rule()
    def decode(self) -> None:
        self.submit(0, "a", "")
        self.obey(f"r{self.count}", [1] * 3)

    @rule(data=st.data(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
    def obey_orders(self, data: st.DataObject, lengths: list[int]) -> None:
        if self.open:
            self.obey(data.draw(st.sampled_from(sorted(self.open))), lengths)

    def obey(self, request_id: str, lengths: list[int]) -> None:
        """Answer orders for one request well, one after the other, until it is decoded or has moved."""
        for num_output_tokens in lengths:
            pending = [effect for effect in self.orders if _request_of(effect) == request_id]
            if not pending or isinstance(pending[-1].message, Decode | TakeOver):
                return
            self.orders.remove(pending[-1])
            order = pending[-1].message
            assert isinstance(order, Order)
            self.do_well(pending[-1].peer, order, num_output_tokens)

    @rule(
        data=st.data(),
        to=st.sampled_from(["d0", "d1", None]),
        lengths=st.lists(st.integers(1, 40), max_size=7),
    )
    def migrate(self, data: st.DataObject, to: str | None, lengths: list[int]) -> None:
        movable = [
            request_id
            for request_id, tracked in self.conductor.requests.items()
            if self.conductor.migrations.may_move(tracked)
        ]
        if movable:
            request_id = data.draw(st.sampled_from(movable))
            self.hear(FRONT, Migrate(1, request_id, to))
            self.obey(request_id, lengths)

    @rule()
    def repair(self) -> None:
        """All instances are there, and take requests; those that were not had been killed."""
        for name in ROLES:
            if self.conductor.instances.get(name) is None:
                self.incarnation += 1
                returning = peer_identity(f"{name}/returning", self.incarnation)
                self.hear(returning, Returning(name, self.incarnation, []))
                self.restart(name, registers=True)
            self.hear(FRONT, Drain(1, name, is_wanted=False))


class RequestsEndOnceWhereTheLoadDecides(RequestsEndOnceWhileTheyMove):
    """Decode instances inline prompts; rules move requests and change roles, by loads that make no sense."""

    profiled = Costs(0.01, 0.01, 0.0), Costs(0.01, 0.001, 1e-6)
    decided_by = PolicySettings(moves_requests=True, has_rebalancing=True, has_inlining=True)
    limits = Limits(
        max_running_requests=30,
        max_migrations=2,
        ttft_slo_s=5.0,
        tbt_slo_s=0.05,
        max_waiting=2,
    )

    @rule(
        name=st.sampled_from([*ROLES]),
        numbers=st.tuples(*[st.integers(0, 6)] * 4),
        num_free_pages=st.integers(0, 100),
        tbt_s=st.sampled_from([None, 0.0, 0.01, 0.06, 0.3]),
    )
    def beat(self, name: str, numbers: tuple[int, ...], num_free_pages: int, tbt_s: float | None) -> None:
        num_running, num_waiting, num_requests, num_awaiting_turn = numbers
        load = DecodeLoad(num_requests, num_awaiting_turn, tbt_s)
        if (instance := self.conductor.instances.get(name)) is not None:
            beat = Heartbeat(num_running, num_waiting, num_free_pages, {name: POOL}, decode_load=load)
            self.hear(instance.identity, beat)

    @rule(num_requests=st.integers(1, 12), seconds=st.integers(1, 6))
    def offer_load(self, num_requests: int, seconds: int) -> None:
        for _ in range(seconds):
            for number in range(num_requests):
                self.decode()
                if number % 2:
                    self.finish(f"r{self.count}")
            self.wait(1.0)

    def finish(self, request_id: str) -> None:
        """Let a request end that is decoded."""
        pending = [effect for effect in self.orders if _request_of(effect) == request_id]
        if pending and isinstance(pending[-1].message, Decode):
            self.orders.remove(pending[-1])
            self.do_well(pending[-1].peer, pending[-1].message, 1)


TestRequestsEndOnce = RequestsEndOnce.TestCase
TestRequestsEndOnce.settings = settings(max_examples=num_examples(60), stateful_step_count=40)
TestRequestsEndOnceWithTheBaseline = RequestsEndOnceWithTheBaseline.TestCase
TestRequestsEndOnceWithTheBaseline.settings = settings(max_examples=num_examples(20), stateful_step_count=40)
TestRequestsEndOnceWhileTheyMove = RequestsEndOnceWhileTheyMove.TestCase
TestRequestsEndOnceWhileTheyMove.settings = settings(max_examples=num_examples(60), stateful_step_count=60)
TestRequestsEndOnceWhereTheLoadDecides = RequestsEndOnceWhereTheLoadDecides.TestCase
TestRequestsEndOnceWhereTheLoadDecides.settings = settings(
    max_examples=num_examples(60), stateful_step_count=40
)
