"""A stream against a publisher that loses messages, restarts, forgets old batches, and answers late."""

import random

import pytest

from conductor.index.event_stream import ANSWER_TIMEOUT_S, MAX_EARLY_BATCHES, QUIET_S, EventStream, Step
from mooncake.messages.kv_events import (
    EventsGone,
    FromKVEvents,
    GetSnapshot,
    KVCleared,
    KVEvent,
    KVEvents,
    KVRemoved,
    KVSnapshot,
    KVStored,
    ReplayDone,
    ReplayEvents,
    ToKVEvents,
)
from mooncake.messages.pools import Tier

DRAM, SSD = Tier.DRAM, Tier.SSD
NOTHING = Step([])


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def batch(sequence: int, incarnation: int = 1) -> KVEvents:
    return KVEvents("p0", incarnation, sequence, [KVStored(DRAM, [key(sequence)])])


def part(sequence: int, keys: list[bytes], is_last: bool = True, incarnation: int = 1) -> KVSnapshot:
    return KVSnapshot("p0", incarnation, sequence, DRAM, keys, is_last)


def current(sequence: int = 4) -> EventStream:
    """Has everything up to batch `sequence`, and knows it."""
    stream = EventStream("p0", 1)
    assert stream.tick(0.0) == Step([], GetSnapshot())
    stream.receive(part(sequence, []), 0.0)
    stream.receive(ReplayDone("p0", 1, sequence + 1), 0.0)
    assert stream.is_current
    return stream


def test_begins_with_a_snapshot_and_what_came_behind_it() -> None:
    stream = EventStream("p0", 1)
    assert stream.tick(0.0) == Step([], GetSnapshot())
    for sequence in (3, 4, 5, 6):
        assert stream.receive(batch(sequence), 0.0) == NOTHING
    first = stream.receive(part(4, [key(90)], is_last=False), 0.1)
    assert first == Step([KVCleared(), KVStored(DRAM, [key(90)])])
    assert not stream.is_current
    last = stream.receive(part(4, [key(91)]), 0.2)
    stored = [KVStored(DRAM, [key(number)]) for number in (91, 5, 6)]
    assert last == Step(stored, ReplayEvents(7))
    assert stream.receive(ReplayDone("p0", 1, 7), 0.3) == NOTHING
    assert stream.receive(batch(7), 0.4) == Step([KVStored(DRAM, [key(7)])])
    assert (stream.num_batches, stream.num_gaps, stream.num_snapshots) == (3, 0, 1)


def test_a_gap_is_replayed_and_later_batches_wait_for_it() -> None:
    stream = current()
    assert stream.receive(batch(7), 1.0) == Step([], ReplayEvents(5))
    assert stream.receive(batch(8), 1.0) == NOTHING
    assert not stream.is_current
    assert stream.receive(batch(5), 1.0) == Step([KVStored(DRAM, [key(5)])])
    assert stream.receive(batch(6), 1.0) == Step([KVStored(DRAM, [key(n)]) for n in (6, 7, 8)])
    assert stream.receive(batch(7), 1.0) == NOTHING
    assert stream.receive(ReplayDone("p0", 1, 8), 1.0) == NOTHING
    assert stream.is_current
    assert stream.num_gaps == 1


def test_another_gap_during_a_replay_is_replayed_afterwards() -> None:
    stream = current()
    assert stream.receive(batch(6), 1.0).ask == ReplayEvents(5)
    assert stream.receive(batch(8), 1.0) == NOTHING
    stream.receive(batch(5), 1.0)
    assert stream.receive(ReplayDone("p0", 1, 7), 1.0) == Step([], ReplayEvents(7))


def test_when_the_replay_is_gone_or_incomplete_a_snapshot_is_asked_for() -> None:
    for answer in (EventsGone("p0", 1, 50, 60), ReplayDone("p0", 1, 60)):
        stream = current()
        stream.receive(batch(50), 1.0)
        assert stream.receive(answer, 1.0) == Step([], GetSnapshot())
        assert stream.receive(part(59, [key(1)]), 1.0).events == [KVCleared(), KVStored(DRAM, [key(1)])]


def test_another_incarnation_is_started_over_with_and_the_former_one_ignored() -> None:
    for message in (
        batch(0, 2),
        part(9, [], incarnation=2),
        ReplayDone("p0", 2, 1),
        EventsGone("p0", 2, 1, 2),
    ):
        stream = current()
        assert stream.receive(message, 1.0) == Step([KVCleared()], GetSnapshot())
        assert stream.receive(batch(5), 1.0) == NOTHING
        assert stream.receive(part(9, [key(1)]), 1.0) == NOTHING
        assert stream.receive(part(0, [key(2)], incarnation=2), 1.0).events[1] == KVStored(DRAM, [key(2)])
        assert stream.receive(batch(1, 2), 1.0).events == [KVStored(DRAM, [key(1)])]


def test_a_newer_snapshot_replaces_one_that_has_begun() -> None:
    stream = EventStream("p0", 1)
    stream.tick(0.0)
    stream.receive(part(4, [key(1)], is_last=False), 0.0)
    assert stream.tick(ANSWER_TIMEOUT_S).ask == GetSnapshot()
    stream.receive(part(9, [key(2)], is_last=False), 6.0)
    assert stream.receive(part(4, [key(3)]), 6.0) == NOTHING
    assert stream.receive(part(9, [key(4)]), 6.0).ask == ReplayEvents(10)
    assert stream.receive(part(9, [key(5)]), 6.0) == NOTHING
    assert stream.num_snapshots == 1


def test_what_is_not_answered_is_asked_for_again_though_live_batches_come() -> None:
    stream = current()
    stream.receive(batch(6), 1.0)
    for second in range(2, 6):
        assert stream.receive(batch(6 + second), float(second)) == NOTHING
    assert stream.tick(0.9 + ANSWER_TIMEOUT_S) == NOTHING
    assert stream.tick(1.0 + ANSWER_TIMEOUT_S) == Step([], ReplayEvents(5))
    assert stream.tick(1.1 + ANSWER_TIMEOUT_S) == NOTHING
    assert EventStream("p0", 1).tick(1000.0).ask == GetSnapshot()


def test_a_quiet_messenger_is_asked_whether_the_last_batch_was_lost() -> None:
    stream = current()
    assert stream.tick(QUIET_S - 0.1) == NOTHING
    assert stream.tick(QUIET_S) == Step([], ReplayEvents(5))
    assert stream.receive(batch(5), QUIET_S).events == [KVStored(DRAM, [key(5)])]
    assert stream.receive(ReplayDone("p0", 1, 6), QUIET_S) == NOTHING
    assert stream.tick(QUIET_S + 0.1) == NOTHING
    assert stream.num_gaps == 0


def test_only_so_many_batches_wait() -> None:
    stream = current()
    for sequence in range(6, 6 + 3 * MAX_EARLY_BATCHES):
        stream.receive(batch(sequence), 1.0)
    assert len(stream.receive(batch(5), 1.0).events) == 1 + MAX_EARLY_BATCHES
    end = ReplayDone("p0", 1, 6 + MAX_EARLY_BATCHES)
    assert stream.receive(end, 1.0) == NOTHING
    following = 6 + MAX_EARLY_BATCHES
    assert stream.receive(batch(following + 1), 1.0).ask == ReplayEvents(following)


class Publisher:
    """A pool's log of the last thirty batches, with restarts; answers are queued like live batches."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.incarnation = 0
        self.held: set[tuple[Tier, bytes]] = set()
        self.wire: list[FromKVEvents] = []
        self._restart()

    def _restart(self) -> None:
        self.incarnation += 1
        self.batches: list[KVEvents] = []
        self.num_batches = 0
        self.held = {held for held in self.held if self._draw.random() < 0.5}  # adopted
        self._publish([KVCleared()])

    def _publish(self, events: list[KVEvent]) -> None:
        message = KVEvents("p0", self.incarnation, self.num_batches, events)
        self.num_batches += 1
        self.batches = [*self.batches[-29:], message]
        if self._draw.random() < 0.7:
            self.wire.append(message)

    def change(self) -> None:
        if self._draw.random() < 0.005:
            self._restart()
        tier, changed = self._draw.choice((DRAM, SSD)), key(self._draw.randrange(30))
        if (tier, changed) in self.held:
            self.held.remove((tier, changed))
            self._publish([KVRemoved(tier, [changed])])
        else:
            self.held.add((tier, changed))
            self._publish([KVStored(tier, [changed])])

    def answer(self, question: ToKVEvents) -> None:
        if self._draw.random() < 0.1:
            return
        life = "p0", self.incarnation
        if isinstance(question, GetSnapshot):
            held = sorted(self.held)
            parts = [KVSnapshot(*life, self.num_batches - 1, tier, [k], False) for tier, k in held]
            self.wire += [*parts, KVSnapshot(*life, self.num_batches - 1, DRAM, [], True)]
        elif self.batches[0].sequence <= question.from_sequence <= self.num_batches:
            self.wire += self.batches[question.from_sequence - self.batches[0].sequence :]
            self.wire.append(ReplayDone(*life, self.num_batches))
        else:
            self.wire.append(EventsGone(*life, self.batches[0].sequence, self.num_batches))


@pytest.mark.parametrize("seed", range(20))
def test_ends_up_with_what_the_pool_holds_whatever_gets_lost(seed: int) -> None:
    draw = random.Random(seed)
    publisher = Publisher(draw)
    stream, held = EventStream("p0", 1), set[tuple[Tier, bytes]]()

    def carry_out(step: Step) -> None:
        for event in step.events:
            match event:
                case KVStored(tier, keys):
                    held.update((tier, stored) for stored in keys)
                case KVRemoved(tier, keys):
                    held.difference_update((tier, removed) for removed in keys)
                case KVCleared():
                    held.clear()
        if step.ask is not None:
            publisher.answer(step.ask)

    now_s = 0.0
    for _ in range(1500):
        now_s += draw.expovariate(10.0)
        action = draw.random()
        if action < 0.3:
            publisher.change()
        elif publisher.wire and action < 0.9:
            carry_out(stream.receive(publisher.wire.pop(0), now_s))
        else:
            carry_out(stream.tick(now_s))
    for _ in range(50):
        now_s += QUIET_S
        carry_out(stream.tick(now_s))
        while publisher.wire:
            carry_out(stream.receive(publisher.wire.pop(0), now_s))
    assert held == publisher.held
    assert stream.is_current
    assert stream.num_snapshots > 1
    assert stream.num_gaps > 0
