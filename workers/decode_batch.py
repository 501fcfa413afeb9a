"""Who is decoded next: admission, growth by page, preemption (Mooncake, section 3, step 4).

First come, first served, but a step of the priority number is worth a minute: whoever came first by that is
admitted first and preempted last, so nobody starves. A sequence that gets no page sits an iteration out
while others' pages are about to come free.

Owns: the batch and who has which pages of the device. Does not know: tokens, time, how anything is copied
or computed.
"""

from bisect import insort
from operator import attrgetter

from workers.engine.kvcache import DeviceKVCache, OutOfPages
from workers.sequence import Sequence, SequenceState

_by_rank = attrgetter("rank")


class DecodeBatch:
    """Decides, step by step: `enter`, then `join` once it is loaded, `leave`, and `free` in the end.

    Invariant: a page is free, or one sequence has it that is LOADING, RUNNING or LEAVING.
    """

    def __init__(self, kv: DeviceKVCache, max_batch: int) -> None:
        self._kv = kv
        self._max_batch = max_batch
        self._waiting: list[Sequence] = []
        self._loading: list[Sequence] = []
        self._running: list[Sequence] = []
        self._leaving: list[Sequence] = []

    @property
    def num_running(self) -> int:
        """Sequences that are being decoded."""
        return len(self._running)

    def enter(self, sequence: Sequence) -> None:
        """Its KVCache is complete, and not on the device: it waits to be admitted."""
        assert sequence.state in (SequenceState.NEW, SequenceState.OUT)
        sequence.state = SequenceState.WAITING
        sequence.admitted.clear()
        sequence.left.clear()
        insort(self._waiting, sequence, key=_by_rank)

    def join(self, sequence: Sequence) -> None:
        """Its KVCache has come to its pages: it is part of the next iteration."""
        if sequence.state is SequenceState.LOADING:
            self._loading.remove(sequence)
            sequence.state = SequenceState.RUNNING
            insort(self._running, sequence, key=_by_rank)

    def leave(self, sequence: Sequence) -> None:
        """It is part of no further iteration. It keeps its pages until `free`. Idempotent."""
        lists = {
            SequenceState.WAITING: self._waiting,
            SequenceState.LOADING: self._loading,
            SequenceState.RUNNING: self._running,
        }
        if sequence.state in lists:
            lists[sequence.state].remove(sequence)
            sequence.state = SequenceState.LEAVING
            self._leaving.append(sequence)

    def free(self, sequence: Sequence) -> None:
        """Nobody reads or writes its pages any more. Idempotent."""
        if sequence.state is SequenceState.LEAVING:
            assert not sequence.is_in_flight
            self._leaving.remove(sequence)
            sequence.state = SequenceState.OUT
            self._kv.free(sequence.pages)
            sequence.pages = []

    def settle(self) -> None:
        """Tell those that have left the batch that no iteration computes with their pages."""
        for sequence in self._leaving:
            if not sequence.is_in_flight:
                sequence.left.set()

    def plan(self) -> list[Sequence]:
        """The sequences of the next iteration, each with a page for its next token; preempts and admits."""
        ready = self._grow()
        self._admit()
        return ready

    # -- pages --------------------------------------------------------------------------------------

    def _grow(self) -> list[Sequence]:
        ready = []
        num_coming = sum(len(sequence.pages) for sequence in self._leaving)
        num_coming += sum(len(sequence.pages) for sequence in self._running if sequence.ends_in_flight)
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING or sequence.ends_in_flight:
                continue
            num_missing = sequence.num_pages_needed(self._kv.page_size) - len(sequence.pages)
            if num_missing <= self._kv.num_free_pages:
                sequence.pages += self._kv.allocate(num_missing)
                ready.append(sequence)
                continue
            if num_missing > num_coming:
                num_coming += self._make_room(sequence)
            num_coming -= num_missing
        return ready

    def _make_room(self, sequence: Sequence) -> int:
        """The last in rank gives way; it may be `sequence` itself. How many pages come free by that."""
        newest = next(other for other in reversed(self._running) if not other.ends_in_flight)
        if newest is sequence and self._loading:
            return 0  # these are about to run
        if len(self._running) == 1:
            self._fail(sequence, sequence.num_pages_needed(self._kv.page_size))
            return 0
        self.leave(newest)
        return len(newest.pages)

    def _fail(self, sequence: Sequence, num_pages: int) -> None:
        sequence.error = OutOfPages(num_pages, self._kv.num_free_pages, self._kv.num_pages)
        self.leave(sequence)
        sequence.admitted.set()

    def _admit(self) -> None:
        """In order, while batch and pages allow it. One page is left to grow."""
        kv = self._kv
        while self._waiting and len(self._running) + len(self._loading) < self._max_batch:
            sequence = self._waiting[0]
            num_pages = sequence.num_pages_needed(kv.page_size)
            num_others = len(self._running) + len(self._loading) + len(self._leaving)
            if kv.num_free_pages < num_pages + (num_others > 0):
                if not num_others:
                    self._fail(sequence, num_pages)
                    continue
                return
            self._waiting.remove(sequence)
            sequence.pages = kv.allocate(num_pages)
            sequence.state = SequenceState.LOADING
            self._loading.append(sequence)
            sequence.admitted.set()
