"""Headroom: queue time that is kept free for longer prompts. Without it only long prompts are rejected.

A queue that is too long for a long prompt still has room for short prompts. Short prompts come more often and
take each second that becomes free. So if each request were checked by itself, in the end no long prompt would
be accepted. Here a prompt that arrives after a longer one was rejected is checked as if it took as long as
the longer one. All prompts then find the queue too long at the same queue length, and prompts of all lengths
are rejected in proportion. No device does less work: the queue is shorter, but never empty while there are
too many requests.

Owns: the prompts that were rejected lately. Does not know: queues, the meaning of SLOs, the clock.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

MEMORY_S = 60.0
"""Seconds for which a rejected prompt keeps headroom."""
MAX_SHARE = 0.75
"""The largest part of a TTFT SLO that is kept free.

If a rejected prompt's prefill takes longer than this part, nothing is kept for the prompt: it could only be
accepted if devices ran out of work.
"""
_NUM_TERMS = 1000
"""The largest number of different `Terms` that are remembered: clients could send any number of them."""


class Terms(NamedTuple):
    """The tenant, priority and TTFT SLO of a request. Headroom is kept only for requests with equal terms."""

    tenant: str
    priority: int
    ttft_slo_s: float


class _Rejected(NamedTuple):
    at_s: float
    prefill_s: float


class Headroom:
    """The longest prompts that were rejected lately, by terms."""

    def __init__(self) -> None:
        self._rejected: OrderedDict[Terms, deque[_Rejected]] = OrderedDict()
        """The rejected prompts by terms, oldest first. Each has a longer prefill than its successors."""

    def rejected(self, terms: Terms, prefill_s: float, now_s: float) -> None:
        """Record that a prompt with a predicted prefill of `prefill_s` seconds was rejected at `now_s`.

        A prefill longer than `MAX_SHARE` of the TTFT SLO is not recorded.
        """
        if prefill_s > MAX_SHARE * terms.ttft_slo_s:
            return
        rejected = self._rejected.setdefault(terms, deque())
        self._rejected.move_to_end(terms)
        if len(self._rejected) > _NUM_TERMS:
            self._rejected.popitem(last=False)
        while rejected and rejected[-1].prefill_s <= prefill_s:
            rejected.pop()
        rejected.append(_Rejected(now_s, prefill_s))

    def kept_s(self, terms: Terms, prefill_s: float, factor: float, came_s: float, now_s: float) -> float:
        """Return the seconds of the TTFT SLO that a prompt must leave free, in addition to its own time.

        Args:
            terms: The terms of the prompt.
            prefill_s: The predicted seconds of the prompt's prefill, corrected already.
            factor: The present correction of predicted TTFTs. The prefills of rejected prompts are multiplied
                by it.
            came_s: The time at which the prompt arrived. Prompts that were rejected later do not count.
            now_s: The time.
        """
        rejected = self._rejected.get(terms)
        while rejected and rejected[0].at_s < now_s - MEMORY_S:
            rejected.popleft()
        if not rejected or rejected[0].at_s > came_s:
            return 0.0
        return max(0.0, min(factor * rejected[0].prefill_s, MAX_SHARE * terms.ttft_slo_s) - prefill_s)
