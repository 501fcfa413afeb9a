"""The decode batch: admission, growth by page, preemption (Mooncake, section 3, step 4).

Sequences are ordered by arrival; each step of the priority number counts like an arrival a minute later. The
first waiting sequence in this order sets the priority that is admitted next, so no sequence starves. Within a
priority the sequence of the tenant and answer with the smallest share of the batch is admitted
(`workers.decode.batching.batch_shares`). If slots or pages are missing, a sequence of a tenant or answer with
a larger share is preempted, the newest first. A sequence that gets no page skips an iteration while pages of
other sequences are about to become free.

Owns: the batch and its device pages. Does not know: tokens, time, how anything is copied or computed.
"""

from bisect import insort
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from workers.decode.batching.batch_shares import BatchShares
from workers.decode.sequence import Sequence, SequenceState
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.errors import NoRoomError

_by_rank = attrgetter("rank")


class FullPage(NamedTuple):
    """A device page that is full of tokens, with the number of the sequence and of its block in the page.

    `stay` counts how often the sequence had left the device before. So the page counts as another `FullPage`
    when another sequence gets the page, and when the sequence leaves the device and gets the page again.
    """

    sequence: int
    stay: int
    block: int
    page: int


class DecodeBatch:
    """The sequences that an instance decodes or will decode, and their device pages.

    A sequence goes through `enter`, `join` once it is loaded, `leave`, and `free` in the end. A sequence that
    migrates here does not `enter`: `prepare` gives it a batch slot and pages beforehand.

    Invariant: a page belongs to at most one sequence, and this sequence is LOADING, PREPARED, RUNNING or
    LEAVING.
    """

    def __init__(self, kv: DeviceKVCache, max_batch: int) -> None:
        self._allocator, self._page_size = kv.pages, kv.page_size
        self._max_batch = max_batch
        self._waiting: list[Sequence] = []
        self._loading: list[Sequence] = []
        self._prepared: list[Sequence] = []
        self._running: list[Sequence] = []
        self._leaving: list[Sequence] = []

    @property
    def num_running(self) -> int:
        """The number of sequences that are being decoded."""
        return len(self._running)

    @property
    def running(self) -> Collection[Sequence]:
        """The sequences that are being decoded."""
        return self._running

    def check_loans(self, sequence: Sequence) -> None:
        """Check that the pages lent to other instances leave enough pages for a sequence's longest output.

        Raises NoRoomError if they do not. A sequence whose longest output would not fit even without loans is
        not refused here.
        """
        num_pages, allocator = sequence.most_pages(self._page_size), self._allocator
        num_own, num_usable = allocator.num_own, allocator.num_usable
        if num_usable < num_pages <= num_own:
            raise NoRoomError(
                f"it may need {num_pages} of {num_own} device pages, and {num_usable} are not lent to another"
                " instance"
            )

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence for admission.

        The KVCache of the sequence is not on the device. Either all of the KVCache is in the pool or in host
        memory, or iterations here will compute the missing part.
        """
        assert sequence.state in (SequenceState.NEW, SequenceState.OUT)
        sequence.state = SequenceState.WAITING
        sequence.admitted.clear()
        sequence.left.clear()
        sequence.prefilled.clear()
        sequence.check_copy()
        insort(self._waiting, sequence, key=_by_rank)

    def prepare(self, sequence: Sequence) -> bool:
        """Reserve a batch slot for a sequence, and pages for its tokens and the next one.

        Returns whether slot and pages were free. Nothing is preempted for the sequence, and waiting sequences
        go first. If the sequence is prepared already, it only gets the pages that it lacks. The sequence
        keeps slot and pages until `leave` and `free`, or runs after `join`.
        """
        assert sequence.state in (SequenceState.NEW, SequenceState.PREPARED)
        self._admit()
        is_new = sequence.state is SequenceState.NEW
        is_alone = not (self._running or self._loading or self._leaving or self._prepared)
        num_pages = -(-(len(sequence.tokens) + 1) // self._page_size) - len(sequence.pages)
        if self._waiting or (is_new and self._lacks_slot):
            return False
        if self._allocator.num_free_for(0) < num_pages + (not is_alone):
            return False
        sequence.pages += self._allocator.allocate(num_pages)
        if is_new:
            sequence.state = SequenceState.PREPARED
            self._prepared.append(sequence)
        return True

    def join(self, sequence: Sequence) -> None:
        """Add a loaded or prepared sequence to the next iteration. A sequence that has left is ignored.

        The sequence's KVCache is in its device pages. Tokens of a prepared sequence that lack KVCache are
        computed by the next iterations.
        """
        beside = {SequenceState.LOADING: self._loading, SequenceState.PREPARED: self._prepared}
        if sequence.state in beside:
            beside[sequence.state].remove(sequence)
            sequence.state = SequenceState.RUNNING
            insort(self._running, sequence, key=_by_rank)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch. Idempotent.

        An iteration that is planned, being planned or running may still compute with the sequence. So the
        sequence keeps its pages until `free`.
        """
        lists = {
            SequenceState.WAITING: self._waiting,
            SequenceState.LOADING: self._loading,
            SequenceState.PREPARED: self._prepared,
            SequenceState.RUNNING: self._running,
        }
        if sequence.state in lists:
            lists[sequence.state].remove(sequence)
            sequence.state = SequenceState.LEAVING
            self._leaving.append(sequence)
            sequence.admitted.set()

    def free(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that no pass and no copy uses any more. Idempotent."""
        if sequence.state is SequenceState.LEAVING:
            assert not sequence.is_in_flight
            self._leaving.remove(sequence)
            sequence.state = SequenceState.OUT
            self._allocator.free(sequence.pages)
            sequence.pages = []
            sequence.num_stays += 1

    def release_left(self) -> None:
        """Set the event `left` of sequences that have left the batch and that no iteration computes with."""
        for sequence in self._leaving:
            if not sequence.is_in_flight:
                sequence.note_left()

    def full_pages(self) -> set[FullPage]:
        """Return the device pages that no iteration and no load writes any more.

        Pages of a leaving sequence are left out, because the sequence may leave in the middle of its load.
        """
        return {
            FullPage(sequence.number, sequence.num_stays, block, page)
            for sequence in (*self._running, *self._prepared)
            for block, page in enumerate(sequence.pages[: sequence.num_kv_tokens // self._page_size])
        }

    def unwritten_pages(self) -> set[int]:
        """Return the pages of running and leaving sequences that have no KVCache yet.

        Valid while no iteration runs.
        """
        page_size = self._page_size
        return {
            page
            for sequence in (*self._running, *self._leaving)
            for page in sequence.pages[-(-sequence.num_kv_tokens // page_size) :]
        }

    @property
    def num_loading_pages(self) -> int:
        """The number of device pages of sequences whose KVCache is being loaded."""
        return sum(len(sequence.pages) for sequence in self._loading)

    def preempt_beyond(self, num_pages: int) -> bool:
        """Preempt the running sequences that have a page whose number is `num_pages` or higher.

        Returns whether there were such sequences.
        """
        beyond = [one for one in self._running if any(page >= num_pages for page in one.pages)]
        for sequence in beyond:
            self.leave(sequence)
        return bool(beyond)

    def prepared_beyond(self, num_pages: int) -> list[Sequence]:
        """Return the prepared sequences that have a page whose number is `num_pages` or higher."""
        return [one for one in self._prepared if any(page >= num_pages for page in one.pages)]

    def plan(self) -> list[Sequence]:
        """Preempt and admit sequences, and return the sequences of the next iteration.

        Each returned sequence has a page for its next token. A returned sequence may be LEAVING: it was
        preempted in this call, and computes one more iteration. Admitted sequences are not returned, because
        they must be loaded first.
        """
        ready = self._grow()
        self._admit()
        return ready

    # -- pages --------------------------------------------------------------------------------------

    def _grow(self) -> list[Sequence]:
        ready = list[Sequence]()
        num_coming = self._num_own_pages(self._ending)
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING or sequence.ends_in_flight:
                continue
            if len(ready) == self._max_batch:  # an iteration was lost, and its last tokens are drawn again
                break
            num_missing = sequence.num_pages_needed(self._page_size) - len(sequence.pages)
            if num_missing <= self._allocator.num_free_for(0):
                sequence.pages += self._allocator.allocate(num_missing)
                ready.append(sequence)
                continue
            if num_missing > num_coming:
                num_coming += self._make_room(sequence)
            num_coming -= num_missing
        return ready

    @property
    def _ending(self) -> list[Sequence]:
        """The sequences whose pages will soon be free: they are about to end, or have left."""
        return [*self._leaving, *(sequence for sequence in self._running if sequence.ends_in_flight)]

    def _num_own_pages(self, sequences: list[Sequence]) -> int:
        """Return how many of the sequences' pages are not at a helper."""
        return sum(len(sequence.pages) - self._num_hosted(sequence) for sequence in sequences)

    def _num_hosted(self, sequence: Sequence) -> int:
        return self._allocator.num_hosted_of(sequence.pages)

    @property
    def _newest_first(self) -> list[Sequence]:
        """The sequences that can be preempted, the newest first."""
        return [sequence for sequence in reversed(self._running) if not sequence.ends_in_flight]

    def _make_room(self, sequence: Sequence) -> int:
        """Preempt at most one sequence, perhaps `sequence` itself, so that `sequence` can grow.

        The newest sequence that yields to `sequence` is preempted. If none yields, the newest sequence that
        could not preempt `sequence` is preempted; this may be `sequence` itself. None is preempted if other
        sequences are about to run, or if `sequence` fails because it runs alone and cannot fit. Returns the
        number of pages that become free here, not at a helper.
        """
        shares = self._shares()
        others = [other for other in self._newest_first if shares.yields(other, sequence, 0, 1)]
        if not others:
            others = [other for other in self._newest_first if not shares.yields(sequence, other, 0, 0)]
        last = others[0]
        if last is sequence and self._loading:
            return 0  # sequences that are being loaded are about to run
        if len(self._running) == 1:
            if self._prepared:
                return 0  # prepared sequences are about to run, or to leave
            if not self._fits(sequence):
                self._fail(sequence)
                return 0
        self.leave(last)
        return self._num_own_pages([last])

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether the device pages here and at a helper are enough for a sequence that is alone."""
        return sequence.num_pages_needed(self._page_size) <= self._most_pages(sequence)

    def _most_pages(self, sequence: Sequence) -> int:
        return self._allocator.most_for(sequence.num_full_pages(self._page_size))

    def _fail(self, sequence: Sequence) -> None:
        num_pages, most_pages = sequence.num_pages_needed(self._page_size), self._most_pages(sequence)
        sequence.error = NoRoomError(f"it needs {num_pages} device pages now, and there are {most_pages}")
        self.leave(sequence)

    # -- admission ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting sequences in turn, and preempt others for them, while slots and pages suffice.

        One page is kept for growth, unless the batch is empty.
        """
        allocator = self._allocator
        while self._waiting:
            sequence = self._first_waiting()
            is_first = not (self._running or self._loading or self._leaving or self._prepared)
            num_pages = sequence.num_pages_needed(self._page_size) + (not is_first)
            num_full = sequence.num_full_pages(self._page_size)
            if not self._fits(sequence):
                self._fail(sequence)
                continue
            if self._lacks_slot_for(sequence) or allocator.num_free_for(num_full) < num_pages:
                for other in self._preempted_for(sequence, num_pages, num_full):
                    self.leave(other)
            if self._lacks_slot_for(sequence) or allocator.num_free_for(num_full) < num_pages:
                return
            self._waiting.remove(sequence)
            sequence.pages = allocator.allocate(num_pages - (not is_first), num_full)
            sequence.state = SequenceState.LOADING
            self._loading.append(sequence)
            sequence.admitted.set()

    @property
    def _lacks_slot(self) -> bool:
        return self._num_slots_taken >= self._max_batch

    def _lacks_slot_for(self, claim: Sequence) -> bool:
        """Return whether all slots are taken that `claim` may have in the next iteration.

        A sequence whose last token is being drawn has no part in the next iteration. So a claim to which the
        sequence yields gets its slot at once, and does not wait for the end of the iteration. By then the
        next iteration is planned, and the claim would wait for that one, too.
        """
        if not self._lacks_slot:
            return False
        shares = self._shares()
        ending = [other for other in self._running if other.ends_in_flight]
        num_given = sum(shares.yields(other, claim, 1, 0) for other in ending)
        return self._num_slots_taken - num_given >= self._max_batch

    @property
    def _num_slots_taken(self) -> int:
        return len(self._running) + len(self._loading) + len(self._prepared)

    def _first_waiting(self) -> Sequence:
        """Return the next sequence to admit.

        The first waiting sequence sets the priority. Of the waiting sequences with this priority, the one
        whose tenant and answer have the smallest shares of the batch is next.
        """
        if len(self._waiting) == 1:
            return self._waiting[0]
        priority, shares = self._waiting[0].request.priority, self._shares()
        equals = (sequence for sequence in self._waiting if sequence.request.priority == priority)
        return min(equals, key=shares.fractions)

    def _preempted_for(self, claim: Sequence, num_pages: int, num_full: int) -> list[Sequence]:
        """Return the sequences to preempt so that `claim` gets a slot and `num_pages` pages.

        Each is the newest sequence of the tenant or answer with the largest share. The list is empty if
        preemption cannot help.
        """
        shares, chosen = self._shares(), list[Sequence]()
        num_slots = self._num_slots_taken
        num_slots -= sum(sequence.ends_in_flight for sequence in self._running)
        left, ending = self._newest_first, self._ending
        num_hosted = sum(self._num_hosted(sequence) for sequence in ending)
        num_own = sum(len(sequence.pages) for sequence in ending) - num_hosted
        while (
            num_slots >= self._max_batch
            or self._allocator.num_free_for(num_full, num_own, num_hosted) < num_pages
        ):
            yielding = [other for other in left if shares.yields(other, claim, 1, num_pages)]
            if not yielding:
                return []
            other = max(yielding, key=shares.fractions)
            left.remove(other)
            shares.remove(other)
            chosen.append(other)
            num_there = self._num_hosted(other)
            num_own += len(other.pages) - num_there
            num_hosted += num_there
            num_slots -= 1
        return chosen

    def _shares(self) -> BatchShares:
        members = [*self._running, *self._loading, *self._prepared]
        return BatchShares(members, self._max_batch, self._allocator.num_usable)
