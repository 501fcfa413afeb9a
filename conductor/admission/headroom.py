"""Headroom: queue time that is kept free for longer prompts, which would else be the only ones rejected.

A queue that is too long for a long prompt still has room for short ones. These come more often and take each
second that becomes free. So if each request is checked by itself, long prompts are rejected first, and in the
end no long prompt is accepted. Here a prompt that arrives after a longer one was rejected is checked as if it
took as long as the longer one. All prompts then find the queue too long at the same queue length, and prompts
of all lengths are rejected in proportion. No device does less work: the queue is shorter, but never empty
while there are too many requests.

Owns: the prompts that were rejected lately. Does not know: queues, the meaning of SLOs, the clock.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

MEMORY_S = 60.0
"""Seconds for which a rejected prompt keeps headroom."""
MAX_SHARE = 0.75
"""The largest part of a TTFT SLO that is kept free. A prompt that needs more would only fit if devices ran
out of work, so nothing is kept for it."""
_NUM_TERMS = 1000
"""Kinds of terms that are remembered: they come from requests, so their number needs a bound."""


class Terms(NamedTuple):
    """The tenant, priority and TTFT SLO of a request. Headroom is kept only for requests on equal terms."""

    tenant: str
    priority: int
    ttft_slo_s: float


class _Rejected(NamedTuple):
    at_s: float
    prefill_s: float


class Headroom:
    """The longest of the prompts that were rejected lately, by terms."""

    def __init__(self) -> None:
        self._rejected: OrderedDict[Terms, deque[_Rejected]] = OrderedDict()
        """Rejected prompts in order of time; each has a longer prefill than all later prompts."""

    def rejected(self, terms: Terms, prefill_s: float, now_s: float) -> None:
        """Record at time `now_s` that a prompt with a predicted prefill of `prefill_s` seconds was
        rejected."""
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
        """Return the seconds of its TTFT SLO that a prompt must leave free, beside its own time.

        Args:
            terms: The terms of the prompt.
            prefill_s: The time of its prefill, times `factor`.
            factor: The factor by which predictions are corrected now.
            came_s: The time at which the prompt arrived. It leaves nothing free for prompts that were
                rejected later.
            now_s: The time.
        """
        rejected = self._rejected.get(terms)
        while rejected and rejected[0].at_s < now_s - MEMORY_S:
            rejected.popleft()
        if not rejected or rejected[0].at_s > came_s:
            return 0.0
        return max(0.0, min(factor * rejected[0].prefill_s, MAX_SHARE * terms.ttft_slo_s) - prefill_s)
