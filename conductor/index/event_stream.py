"""One messenger's KV events: messages go in, ordered events and questions to the messenger come out.

    no snapshot ──> its parts ──> live batches, in order, each once ──(gap)──> replay ──> live
         ^───────────────── the replay is gone, or another incarnation ────────────┘

A question without an answer is asked again. A messenger that has been quiet for a while is asked whether its
last batch got lost. A batch that comes too early waits for the batches before it, up to a limit.

Owns: sequence numbers, incarnations, deadlines. Does not know: sockets, the clock, the meaning of events.
"""

from typing import NamedTuple

from mooncake.messages.kv_events import (
    EventsGone,
    FromKVEvents,
    GetSnapshot,
    KVCleared,
    KVEvent,
    KVEvents,
    KVSnapshot,
    KVStored,
    ReplayDone,
    ReplayEvents,
    ToKVEvents,
)

ANSWER_TIMEOUT_S = 5.0
"""Seconds after which a question whose answer makes no progress is asked again."""
QUIET_S = 3.0
"""Seconds without a batch after which a messenger is asked whether its last batch got lost."""
MAX_EARLY_BATCHES = 100
"""The most batches that wait for earlier batches: as many as come in a second. Further ones are replayed."""


class Step(NamedTuple):
    """Events to apply in order, and a question to send afterwards; None for no question."""

    events: list[KVEvent]
    ask: ToKVEvents | None = None


class EventStream:
    """The stream of KV events of the messenger `instance`, beginning with its life `incarnation`.

    The first tick asks for a snapshot.
    """

    def __init__(self, instance: str, incarnation: int) -> None:
        self.instance = instance
        self.incarnation = incarnation
        self.num_batches = 0
        """The number of batches that have been applied."""
        self.num_gaps = 0
        self.num_snapshots = 0
        """The number of snapshots that have been applied completely."""
        self._next_sequence: int | None = None
        """The number of the next batch to apply; None until a snapshot has been applied."""
        self._early: dict[int, list[KVEvent]] = {}
        """Batches that wait for earlier batches, by number. All numbers are greater than `_next_sequence`."""
        self._snapshot_sequence: int | None = None
        """The sequence number of the snapshot whose parts are arriving; None between snapshots."""
        self._asked: ToKVEvents | None = None
        """The question whose answer is not complete; None if no question is open."""
        self.progress_s = 0.0
        """The time of the latest question, part of an answer, or batch in order."""

    @property
    def is_current(self) -> bool:
        """Whether a snapshot and all known batches have been applied."""
        return self._next_sequence is not None and not self._early

    @property
    def needs_snapshot(self) -> bool:
        """Whether a complete snapshot must be applied before batches can be."""
        return self._next_sequence is None

    def is_loading(self, now_s: float) -> bool:
        """Return whether a snapshot was asked for and may still come.

        The wait ends when the question and the latest part of the answer are `ANSWER_TIMEOUT_S` old.
        """
        return isinstance(self._asked, GetSnapshot) and now_s - self.progress_s < ANSWER_TIMEOUT_S

    def tick(self, now_s: float) -> Step:
        """Return the question to send, if one is due at `now_s`. The step has no events."""
        silence_s = now_s - self.progress_s
        if self._next_sequence is None:
            is_due = self._asked is None or silence_s >= ANSWER_TIMEOUT_S
            return Step([], self._ask_snapshot(now_s) if is_due else None)
        is_due = silence_s >= (QUIET_S if self._asked is None else ANSWER_TIMEOUT_S)
        return Step([], self._ask_replay(self._next_sequence, now_s) if is_due else None)

    def receive(self, message: FromKVEvents, now_s: float) -> Step:
        """Process a live batch or a part of an answer. Returns the events to apply, and the next question."""
        if message.incarnation < self.incarnation:
            return Step([])  # it was in flight when that life ended
        restarted: list[KVEvent] = []
        if message.incarnation > self.incarnation:
            self.incarnation = message.incarnation
            self._next_sequence = self._asked = self._snapshot_sequence = None
            self._early.clear()
            restarted.append(KVCleared())
        match message:
            case KVEvents():
                events, ask = self._on_batch(message, now_s)
            case KVSnapshot():
                events, ask = self._on_snapshot(message, now_s)
            case ReplayDone():
                events, ask = self._on_replay_done(message, now_s)
            case EventsGone():
                is_asked = isinstance(self._asked, ReplayEvents)
                events, ask = Step([], self._ask_snapshot(now_s) if is_asked else None)
        if restarted and ask is None:
            ask = self._ask_snapshot(now_s)
        return Step(restarted + events, ask)

    def _on_batch(self, batch: KVEvents, now_s: float) -> Step:
        expected = self._next_sequence
        if expected is not None and batch.sequence < expected:
            return Step([])  # replayed, or in the snapshot
        if expected is None or batch.sequence > expected:
            if len(self._early) < MAX_EARLY_BATCHES:
                self._early[batch.sequence] = batch.events
            if expected is None or self._asked is not None:
                return Step([])
            self.num_gaps += 1
            return Step([], self._ask_replay(expected, now_s))
        self._early[batch.sequence] = batch.events
        self.progress_s = now_s
        return Step(self._in_order(expected))

    def _on_snapshot(self, part: KVSnapshot, now_s: float) -> Step:
        begun = self._snapshot_sequence
        if not isinstance(self._asked, GetSnapshot) or (begun is not None and part.sequence < begun):
            return Step([])  # of an answer that a later one has replaced
        self._snapshot_sequence, self.progress_s = part.sequence, now_s
        events: list[KVEvent] = [KVCleared()] if part.sequence != begun else []
        events.append(KVStored(part.tier, part.keys))
        if not part.is_last:
            return Step(events)
        self.num_snapshots += 1
        self._snapshot_sequence = None
        events += self._in_order(part.sequence + 1)
        # The subscription may have begun after the snapshot was taken.
        assert self._next_sequence is not None
        return Step(events, self._ask_replay(self._next_sequence, now_s))

    def _on_replay_done(self, done: ReplayDone, now_s: float) -> Step:
        if not isinstance(self._asked, ReplayEvents):
            return Step([])
        self._asked, self.progress_s = None, now_s
        expected = self._next_sequence
        assert expected is not None
        if done.next_sequence > expected:
            return Step([], self._ask_snapshot(now_s))  # parts of the answer were lost
        if self._early:
            return Step([], self._ask_replay(expected, now_s))  # there was another gap meanwhile
        return Step([])

    def _in_order(self, next_sequence: int) -> list[KVEvent]:
        """Return the events of all batches from `next_sequence` to the first gap, and advance."""
        events: list[KVEvent] = []
        while next_sequence in self._early:
            events += self._early.pop(next_sequence)
            self.num_batches += 1
            next_sequence += 1
        self._next_sequence = next_sequence
        self._early = {sequence: early for sequence, early in self._early.items() if sequence > next_sequence}
        return events

    def _ask_snapshot(self, now_s: float) -> GetSnapshot:
        self._next_sequence = self._snapshot_sequence = None
        self.progress_s = now_s
        self._asked = question = GetSnapshot()
        return question

    def _ask_replay(self, from_sequence: int, now_s: float) -> ReplayEvents:
        self.progress_s = now_s
        self._asked = question = ReplayEvents(from_sequence)
        return question
