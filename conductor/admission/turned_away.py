"""Prompts that were refused because their first token would be late, and what is kept free for their kind.

A queue that is too long for a long prompt has room for short ones. They come more often, and take what comes
free each time, so whoever checks each request by itself refuses long prompts first, and at last all of them.
Here a prompt that comes after a longer one was refused is checked as if it took as long. All then find the
queue too long at the same length of it, and lengths are refused in proportion. The queue is shorter, and
no device does less: there is one as long as there are too many requests. It is so with every policy, whatever
else that rejects by.

Owns: who was refused lately. Does not know: queues, SLOs' meaning, the clock.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

MEMORY_S = 60.0
"""after which a refusal keeps no room any more"""
MAX_SHARE = 0.75
"""of a TTFT SLO may be kept: for a prompt that fills it by itself devices would have to run out of work.
For a longer one nothing is kept: it would not be enough, and others would be refused in vain"""
_NUM_TERMS = 1000


class Terms(NamedTuple):
    """Only requests on equal terms wait for each other's room: others have queues of another length, and no
    tenant keeps room free that another one then lacks."""

    tenant: str
    priority: int
    ttft_slo_s: float


class _Refused(NamedTuple):
    at_s: float
    prefill_s: float


class TurnedAway:
    """The longest of the latest, by terms."""

    def __init__(self) -> None:
        self._refused: OrderedDict[Terms, deque[_Refused]] = OrderedDict()
        """in the order in which they came; each took longer than all behind it"""

    def note(self, terms: Terms, prefill_s: float, now_s: float) -> None:
        """A prompt that was predicted to be computed in `prefill_s` was refused."""
        if prefill_s > MAX_SHARE * terms.ttft_slo_s:
            return
        refused = self._refused.setdefault(terms, deque())
        self._refused.move_to_end(terms)
        if len(self._refused) > _NUM_TERMS:
            self._refused.popitem(last=False)
        while refused and refused[-1].prefill_s <= prefill_s:
            refused.pop()
        refused.append(_Refused(now_s, prefill_s))

    def kept_s(self, terms: Terms, prefill_s: float, factor: float, came_s: float, now_s: float) -> float:
        """Of its TTFT SLO, beyond its own time: what a prompt of `prefill_s` that `came_s` leaves free.

        `factor`: so many times as long as predicted prompts are taken to be now; `prefill_s` is that long.
        """
        refused = self._refused.get(terms)
        while refused and refused[0].at_s < now_s - MEMORY_S:
            refused.popleft()
        if not refused or refused[0].at_s > came_s:
            return 0.0
        return max(0.0, min(factor * refused[0].prefill_s, MAX_SHARE * terms.ttft_slo_s) - prefill_s)
