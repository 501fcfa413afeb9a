"""In which order prompts of several tenants are computed: fair queueing, in tokens.

Tenants: the prompt goes first that would end first if all tenants' prompts were computed side by side (the
fair sojourn protocol, Friedman and Henderson, SIGMETRICS 2003). So a short prompt waits for no long one of
another tenant, nor for a hundred, and no prompt ends much later than with equal parts for all tenants.

Of a tenant: first come, first served, but the second prompt of an answer counts as if it had come when the
first one's tokens had been computed (start-time fair queueing, Goyal et al., SIGCOMM 1996).

A tenant that comes begins with what the least served one that waits has had: idle time earns no credit, and
nobody starves. As long as a tenant has little to compute, it is about a pass ahead: turns are given by the
pass, and with less two prompts that come soon after one another would not both be served at once.

Owns: what each tenant has had, virtual time among its answers. Does not know: priorities, deadlines, passes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from mooncake.messages.requests import Flow


class Waiting(Protocol):
    """A prompt that is not computed."""

    flow: Flow
    start: float
    """in its tenant's virtual time; `FairOrder.enter` sets it"""

    @property
    def num_expected(self) -> int:
        """Tokens that are still to be computed, as far as known."""


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True)
class _Tenant:
    num_had: float
    """tokens that were computed for it; what the least served one had had when it came, if that was more"""
    now: float = 0.0
    """virtual time among its answers"""
    num_waiting: dict[str, int] = field(default_factory=dict)
    """prompts, by answer"""
    next_starts: dict[str, float] = field(default_factory=dict)
    """by answer"""


class FairOrder:
    """Of all prompts that have entered and not left. It begins anew when there are none.

    A tenant with at most `lead_tokens` to compute is so many ahead.
    """

    def __init__(self, lead_tokens: int = 0) -> None:
        self._lead_tokens = lead_tokens
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, prompt: Waiting) -> None:
        """It waits from now on."""
        tenant_name, answer_id = prompt.flow
        tenant = self._tenants.setdefault(tenant_name, _Tenant(0.0))
        if not tenant.num_waiting:  # idle time earns no credit
            waiting = [other.num_had for other in self._tenants.values() if other.num_waiting]
            tenant.num_had = max(tenant.num_had, min(waiting, default=0.0))
        prompt.start = max(tenant.now, tenant.next_starts.get(answer_id, 0.0))
        tenant.next_starts[answer_id] = prompt.start + prompt.num_expected
        tenant.num_waiting[answer_id] = tenant.num_waiting.get(answer_id, 0) + 1

    def leave(self, prompt: Waiting) -> None:
        """It has been computed, or nobody wants it."""
        tenant_name, answer_id = prompt.flow
        tenant = self._tenants[tenant_name]
        tenant.num_waiting[answer_id] -= 1
        if not tenant.num_waiting[answer_id]:
            del tenant.num_waiting[answer_id], tenant.next_starts[answer_id]
        if not any(other.num_waiting for other in self._tenants.values()):
            self._tenants.clear()

    def computed(self, prompt: Waiting, num_tokens: int) -> None:
        """So many tokens of a prompt are computed that has not left."""
        tenant = self._tenants[prompt.flow.tenant]
        tenant.num_had += num_tokens
        tenant.now += num_tokens / len(tenant.num_waiting)

    def ordered(self, prompts: Iterable[T]) -> list[T]:
        """Sort prompts that have entered, given in order of arrival: the next to be computed comes first."""
        in_turn = sorted(prompts, key=lambda prompt: prompt.start)
        num_expected: Counter[str] = Counter()
        for prompt in in_turn:
            num_expected[prompt.flow.tenant] += prompt.num_expected
        ends = {
            name: self._tenants[name].num_had - (self._lead_tokens if num <= self._lead_tokens else 0)
            for name, num in num_expected.items()
        }
        keyed = []
        for prompt in in_turn:
            ends[prompt.flow.tenant] += prompt.num_expected
            keyed.append((ends[prompt.flow.tenant], prompt))
        # On a tie: the tenant with the least work left after it.
        return [prompt for _, prompt in sorted(keyed, key=lambda pair: (pair[0], ends[pair[1].flow.tenant]))]
