"""Random messages, losses and times: every request ends once."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.requests.lifecycle import PLACED, RequestState
from conductor.rules import Limits, Rules, SLOs
from mooncake.config.policies import Overload
from mooncake.messages.bus import peer_identity
from mooncake.messages.fronts import (
    Cancel,
    Failed,
    FrontHello,
    InFlight,
    Rejected,
    Submit,
    Unknown,
)
from mooncake.messages.kv_events import KVStored
from mooncake.messages.operators import ChangeRole, Drain
from mooncake.messages.pools import Tier
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    STAGES,
    Decode,
    Finished,
    Prefill,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
    Role,
    WorkFailed,
)
from tests.conductor.small_cluster import (
    EPOCH,
    FRONT,
    GRANT,
    registration,
    request,
)
from tests.examples import num_examples


class RequestsEndOnce(RuleBasedStateMachine):
    """No order of messages, losses and returns loses a request, ends it twice, or leaves a load behind it."""

    overload = Overload.PREDICTION

    def __init__(self) -> None:
        super().__init__()
        # SLOs that some requests would miss: whom the generic costs reject is told so.
        limits = Limits(
            max_running_requests=12,
            ttft_slo_s=0.004,
            tbt_slo_s=0.0053,
            slo_classes={"patient": SLOs(5.0, 0.0052)},
            max_waiting=3,
        )
        self.conductor = Conductor(EPOCH, "model", limits, Rules(overload=self.overload))
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
            self.conductor.handle(peer_identity(name, 1), registration(name, role), 0.0)
        self.now_s = 0.0
        self.incarnation = 1
        self.open: set[str] = set()
        self.orders: list[Effect] = []
        self.count = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.peer == FRONT and isinstance(effect.message, Failed | Rejected):
                assert effect.message.request_id in self.open
                self.open.remove(effect.message.request_id)
            if isinstance(effect.message, Reserve | Prefill | Decode):
                self.orders.append(effect)

    @rule(priority=st.integers(-1, 1), tenant=st.sampled_from("ab"), slo=st.sampled_from(["", "patient"]))
    def submit(self, priority: int, tenant: str, slo: str) -> None:
        self.count += 1
        self.open.add(f"r{self.count}")
        order = msgspec.structs.replace(
            request(f"r{self.count}", 9 + 40 * (self.count % 3)),
            priority=priority,
            tenant=tenant,
            slo_class=slo,
        )
        self.take(self.conductor.handle(FRONT, Submit(order), self.now_s))

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), num_blocks=st.integers(1, 4))
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
        assert isinstance(order, Reserve | Prefill | Decode)
        before = self.conductor.num_running
        if outcome in ("retry", "fail"):
            self.take(
                self.conductor.handle(effect.peer, WorkFailed(order.ref, "x", outcome == "retry"), self.now_s)
            )
        elif outcome == "refuse":
            self.take(self.conductor.handle(effect.peer, Refused(order.ref, "slow", 2, 0.2), self.now_s))
        elif outcome == "well":
            match order:
                case Reserve(ref=ref):
                    self.take(self.conductor.handle(effect.peer, Reserved(ref, GRANT), self.now_s))
                case Prefill(ref=ref):
                    self.take(self.conductor.handle(effect.peer, Prefilled(ref, 1, 0), self.now_s))
                case Decode(ref=ref):
                    done = Finished(ref, FinishReason.STOP, 1)
                    self.take(self.conductor.handle(effect.peer, done, self.now_s))
                    if self.conductor.num_running < before:
                        self.open.remove(ref.request_id)

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

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), registers=st.booleans())
    def restart(self, name: str, registers: bool) -> None:
        if registers:
            self.incarnation += 1
            identity = peer_identity(name, self.incarnation)
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            message = registration(name, role, self.incarnation)
            self.take(self.conductor.handle(identity, message, self.now_s))
        elif (instance := self.conductor.instances.get(name)) is not None:
            self.take(self.conductor.peer_gone(instance.identity, self.now_s))

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), is_wanted=st.booleans(), stays=st.booleans())
    def drain(self, name: str, is_wanted: bool, stays: bool) -> None:
        order = Drain(1, name, is_wanted, force=True, stays=stays)
        self.take(self.conductor.handle(FRONT, order, self.now_s))

    @rule(name=st.sampled_from(["p0", "p1", "d0"]), role=st.sampled_from(STAGES))
    def change_role(self, name: str, role: Role) -> None:
        self.take(self.conductor.handle(FRONT, ChangeRole(1, name, role, force=True), self.now_s))

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

    @invariant()
    def loads_are_those_of_open_requests(self) -> None:
        loads, transfers = self.conductor.view.loads, self.conductor.view.transfers
        assert loads.num_slots <= 3
        for instance in self.conductor.instances:
            slot = self.conductor.prefixes.slots[instance.name]
            assert loads.num_assigned[slot] == len(instance.requests)
        states = [tracked.state for tracked in self.conductor.requests.values()]
        assert self.conductor.num_queued == states.count(RequestState.QUEUED)
        num_placed = sum(state in PLACED for state in states)
        assert loads.batch_size.sum() == num_placed
        assert loads.num_decoding.sum() == states.count(RequestState.DECODING)
        if not num_placed:
            for array in (loads.queued_s, loads.num_kv_tokens, loads.num_decoding_tokens):
                assert not array.any()
            assert not transfers.ordered_bytes.any()


class RequestsEndOnceWithTheBaseline(RequestsEndOnce):
    """Section 7.1: decode's load is checked when prefill has ended."""

    overload = Overload.BASELINE


TestRequestsEndOnce = RequestsEndOnce.TestCase
TestRequestsEndOnce.settings = settings(max_examples=num_examples(60), stateful_step_count=40)
TestRequestsEndOnceWithTheBaseline = RequestsEndOnceWithTheBaseline.TestCase
TestRequestsEndOnceWithTheBaseline.settings = settings(max_examples=num_examples(20), stateful_step_count=40)
