"""Headroom: queue time that is kept free for longer prompts, which would else be the only ones refused.

A queue that is too long for a long prompt has room for short ones. They come more often and take each second
that comes free, so checks of each request by itself refuse long prompts first, and at last all of them. Here
a prompt that comes after a longer one was refused is checked as if it took as long. All prompts then find
the queue too long at the same length of it, and lengths are refused in proportion. No device does less: the
queue is shorter, and there is one as long as there are too many requests.

Owns: the prompts that were refused lately. Does not know: queues, the meaning of SLOs, the clock.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

MEMORY_S = 60.0
"""The time for which a refused prompt keeps headroom."""
MAX_SHARE = 0.75
"""The largest part of a TTFT SLO that is kept: devices would have to run out of work for a longer prompt.
Nothing is kept for that one, as it would not be enough."""
_NUM_TERMS = 1000


class Terms(NamedTuple):
    """The queue that a request stands in. Requests keep headroom for others on equal terms only."""

    tenant: str
    priority: int
    ttft_slo_s: float


class _Refused(NamedTuple):
    at_s: float
    prefill_s: float


class Headroom:
    """The longest of the prompts that were refused lately, by terms."""

    def __init__(self) -> None:
        self._refused: OrderedDict[Terms, deque[_Refused]] = OrderedDict()
        """Refused prompts in order of time; each took longer than all behind it."""

    def refused(self, terms: Terms, prefill_s: float, now_s: float) -> None:
        """Learn that a prompt was refused, whose prefill was predicted to take `prefill_s`."""
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
        """The part of its TTFT SLO that a prompt leaves free, beside the time that it takes itself.

        Args:
            terms: The prompt's.
            prefill_s: The time of its prefill, times `factor`.
            factor: The factor by which predictions are corrected now.
            came_s: The time at which the prompt came: earlier ones keep nothing for later refusals.
            now_s: The time.
        """
        refused = self._refused.get(terms)
        while refused and refused[0].at_s < now_s - MEMORY_S:
            refused.popleft()
        if not refused or refused[0].at_s > came_s:
            return 0.0
        return max(0.0, min(factor * refused[0].prefill_s, MAX_SHARE * terms.ttft_slo_s) - prefill_s)
