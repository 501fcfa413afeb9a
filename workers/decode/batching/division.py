"""The moves of running sequences' first pages to a helper and back (BanaServe, section 4.1, by sequence).

Owns: which pages go, and what becomes of them when they have been copied. Does not know: when sequences are
divided, how pages are copied, the helper.
"""

from collections.abc import Collection
from typing import NamedTuple

from workers.decode.sequence import Sequence, SequenceState
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.device_pages import DevicePages

_LEAST_DIVIDED = 4
"""The fewest full pages of a running sequence that are worth a pause between two iterations."""
_DIVIDED_AGAIN = 16
"""The number of movable pages with which a second division is always worth its pause.

If fewer sequences run than this number, one movable page for each running sequence is enough.
"""


class Division(NamedTuple):
    """Full pages of a running sequence that are being moved to a helper, or back.

    They are the pages behind the sequence's first `first` pages. `stay` counts how often the sequence had
    left the device when the move began. `pages` are the new pages, at the helper or on this instance.
    """

    sequence: Sequence
    stay: int
    first: int
    pages: list[int]

    @property
    def replaced(self) -> list[int]:
        """The sequence's present pages, which `pages` will replace."""
        return self.sequence.pages[self.first : self.first + len(self.pages)]


def begin_division(
    running: Collection[Sequence], kv: DeviceKVCache, *, again: bool = False
) -> list[Division]:
    """Choose full pages of running sequences to move to a helper, and allocate pages there for them.

    The caller copies the pages, then calls `end_division`. `drop_division` gives divisions up. Sequences that
    are being stored keep their pages.

    `again` says whether sequences have been divided before. If so, and if this instance has a free page for
    each running sequence, few pages do not move: a division pauses all sequences, and a few freed pages would
    soon be filled. Pages are few if there are fewer than `_DIVIDED_AGAIN`, and fewer than running sequences.
    """
    num_running, num_going = len(running), 0
    chosen = list[tuple[Sequence, int, int]]()
    for sequence in (one for one in running if not one.num_stores):
        first = kv.pages.num_hosted_of(sequence.pages)
        num_full = sequence.num_full_pages(kv.page_size)
        # One free page is kept for each running sequence: many need their next one at the same time.
        num_there = kv.pages.num_to_host(
            len(sequence.pages), num_full, sequence.pages, num_going, num_kept=num_running
        )
        num = num_there - first
        if num >= _LEAST_DIVIDED:
            chosen.append((sequence, first, num))
            num_going += num
    has_room = kv.pages.num_free_for(0) >= num_running
    if again and has_room and num_going < min(num_running, _DIVIDED_AGAIN):
        return []
    return [
        Division(sequence, sequence.num_stays, first, kv.pages.allocate_hosted(num))
        for sequence, first, num in chosen
    ]


def begin_reunion(running: Collection[Sequence], kv: DeviceKVCache) -> list[Division]:
    """Choose running sequences whose pages all come back from a helper, and allocate pages here for them.

    As many sequences as possible are chosen: those with the fewest pages at the helper. One free page is kept
    for each running sequence. The caller goes on as after `begin_division`.
    """
    num_free = kv.pages.num_free_for(0) - len(running)
    there = ((kv.pages.num_hosted_of(one.pages), one) for one in running if not one.num_stores)
    divisions = list[Division]()
    for num, sequence in sorted(there, key=lambda one: one[0]):
        if 0 < num <= num_free:
            divisions.append(Division(sequence, sequence.num_stays, 0, kv.pages.allocate(num)))
            num_free -= num
    return divisions


def end_division(divisions: list[Division], device_pages: DevicePages) -> None:
    """Replace pages of sequences by their copies, and free the replaced pages.

    To be called while no iteration runs. Sequences that have left meanwhile, or are being stored, keep their
    pages. `divisions` is empty afterwards.
    """
    while divisions:
        division = divisions.pop()
        sequence, replaced = division.sequence, division.replaced
        is_same = sequence.state is SequenceState.RUNNING and sequence.num_stays == division.stay
        if is_same and not sequence.num_stores:
            sequence.pages[division.first : division.first + len(replaced)] = division.pages
            device_pages.free(replaced)
        else:
            device_pages.free(division.pages)


def drop_division(divisions: list[Division], device_pages: DevicePages) -> None:
    """Free the new pages of divisions that have not ended. `divisions` is empty afterwards."""
    while divisions:
        device_pages.free(divisions.pop().pages)
