"""The order in which prompts of several tenants are computed: fair queueing, in tokens.

Between tenants, prompts go in the order in which they would end if all tenants were served side by side (the
fair sojourn protocol, Friedman and Henderson, SIGMETRICS 2003). So a short prompt waits neither for one long
prompt of another tenant nor for a hundred short ones, and no prompt ends much later than with equal shares.

Within a tenant, prompts are computed in order of arrival. However, the second prompt of an answer counts as
arriving when the first prompt's tokens have been computed (start-time fair queueing, Goyal et al., SIGCOMM
1996).

A new tenant begins with the service of the least served waiting tenant, so idle time earns no credit, and no
tenant starves. A tenant with little to compute is placed ahead by about the tokens of one pass. Otherwise,
of two short prompts that arrive soon after one another, the second would wait for another tenant's pass.

Owns: each tenant's service and virtual time. Does not know: priorities, deadlines, passes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, TypeVar

from mooncake.messages.requests import Flow


class Waiting(Protocol):
    """A prompt that is not completely computed."""

    flow: Flow
    start: float
    """The prompt's start in the tenant's virtual time, set by `FairOrder.enter`."""

    @property
    def num_expected(self) -> int:
        """The number of tokens that will probably be computed for the prompt."""


T = TypeVar("T", bound=Waiting)
_START = attrgetter("start")


@dataclass(slots=True)
class _Tenant:
    num_served: float
    """Tokens computed for the tenant.

    A tenant that was idle begins with at least as many as the least served waiting tenant.
    """
    now: float = 0.0
    """The tenant's virtual time: the tokens that each waiting answer would have got with equal shares."""
    num_waiting: dict[str, int] = field(default_factory=dict)
    """The number of waiting prompts by answer."""
    next_starts: dict[str, float] = field(default_factory=dict)
    """The virtual start of the next prompt by answer."""


class FairOrder:
    """The order of all prompts that have entered and not left.

    A tenant with at most `lead_tokens` to compute is placed as if it had been served `lead_tokens` less.

    When the last prompt has left, all service is forgotten.
    """

    def __init__(self, lead_tokens: int = 0) -> None:
        self._lead_tokens = lead_tokens
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, prompt: Waiting) -> None:
        """Add a waiting prompt."""
        tenant_name, answer_id = prompt.flow
        tenant = self._tenants.setdefault(tenant_name, _Tenant(0.0))
        if not tenant.num_waiting:  # idle time earns no credit
            waiting = [other.num_served for other in self._tenants.values() if other.num_waiting]
            tenant.num_served = max(tenant.num_served, min(waiting, default=0.0))
        prompt.start = max(tenant.now, tenant.next_starts.get(answer_id, 0.0))
        tenant.next_starts[answer_id] = prompt.start + prompt.num_expected
        tenant.num_waiting[answer_id] = tenant.num_waiting.get(answer_id, 0) + 1

    def leave(self, prompt: Waiting) -> None:
        """Remove a prompt that has been computed or aborted."""
        tenant_name, answer_id = prompt.flow
        tenant = self._tenants[tenant_name]
        tenant.num_waiting[answer_id] -= 1
        if not tenant.num_waiting[answer_id]:
            del tenant.num_waiting[answer_id], tenant.next_starts[answer_id]
        if not any(other.num_waiting for other in self._tenants.values()):
            self._tenants.clear()

    def computed(self, prompt: Waiting, num_tokens: int) -> None:
        """Charge `num_tokens` of a prompt, whose pass is planned or has begun, to the prompt's tenant."""
        tenant = self._tenants[prompt.flow.tenant]
        tenant.num_served += num_tokens
        tenant.now += num_tokens / len(tenant.num_waiting)

    def ordered(self, prompts: Iterable[T]) -> list[T]:
        """Return prompts in the order in which they should be computed.

        `prompts` have entered, and are in order of arrival.
        """
        in_turn = sorted(prompts, key=_START)
        if len({prompt.flow.tenant for prompt in in_turn}) <= 1:
            return in_turn
        num_expected: Counter[str] = Counter()
        for prompt in in_turn:
            num_expected[prompt.flow.tenant] += prompt.num_expected
        ends = {
            name: self._tenants[name].num_served - (self._lead_tokens if num <= self._lead_tokens else 0)
            for name, num in num_expected.items()
        }
        keyed = []
        for prompt in in_turn:
            ends[prompt.flow.tenant] += prompt.num_expected
            keyed.append((ends[prompt.flow.tenant], prompt))
        # On a tie, the prompt whose tenant has the least work after it goes first.
        return [prompt for _, prompt in sorted(keyed, key=lambda pair: (pair[0], ends[pair[1].flow.tenant]))]
