"""The order in which prompts reserve pool pages at a decode instance: fair shares of the pool.

A reserved prompt holds its pages until its sequence joins the batch, perhaps long after its prefill. So the
prompts of a tenant hold at most a share of the pool, and the prompts of an answer hold at most a smaller
share. The remaining pages are left to other tenants: their prompts need not wait until the batch has served
all earlier prompts. The next prompt comes from the tenant that holds the fewest pages, and within the
tenant from the answer that holds the fewest pages. Among equals the oldest prompt is the next.

A waiting prompt counts with pages for all of its blocks, even if the pool has some of the blocks: a block can
be evicted until it is reserved.

Short prompts have turns of their own, and an eighth of the pool that long prompts cannot use. So a short
prompt does not wait for the long prompts of many tenants.

Owns: the order of reservations. Does not know: how pages are reserved, the contents of pages.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mooncake.messages.requests import Flow

TENANT_SHARE = 0.75
"""The largest share of the pool's pages for the reserved prompts of one tenant.

A prompt that is the tenant's only one is allowed more.
"""
ANSWER_SHARE = 0.5
"""The largest share of the pool's pages for the reserved prompts of one answer.

A prompt that is the answer's only one is allowed more.
"""
LONG_SHARE = 7 / 8
"""The largest share of the pool's pages for long prompts. A single long prompt is allowed more."""
_LONGEST_SHORT_SHARE = 1 / 64
"""The largest share of the pool's pages that a short prompt needs. A prompt of one page is always short."""


@dataclass(slots=True, eq=False)
class _Waiting:
    flow: Flow
    num_pages: int
    turn: asyncio.Future[None]


class ReservingTurns:
    """The turns in which prompts reserve pages: one short and one long prompt at a time.

    `held` yields the flow and pages of each reserved prompt.
    """

    def __init__(self, num_pages: int, held: Callable[[], Iterable[tuple[Flow, int]]]) -> None:
        self._num_pages, self._held = num_pages, held
        self._waiting: list[_Waiting] = []
        self._having_turns: list[_Waiting] = []

    @asynccontextmanager
    async def turn(self, flow: Flow, num_pages: int) -> AsyncIterator[None]:
        """Wait for the turn of a prompt of `num_pages`. The turn lasts until the `with` block ends."""
        waiting = _Waiting(flow, num_pages, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            self.recheck()
            await waiting.turn
            yield
        finally:
            having = self._waiting if waiting in self._waiting else self._having_turns
            having.remove(waiting)
            self.recheck()

    def recheck(self) -> None:
        """Give each free turn, for short or for long prompts, to the next prompt that waits for it.

        To be called when pages have been released.
        """
        if not self._waiting:
            return
        num_long, by_tenant, by_answer = 0, Counter[str](), Counter[Flow]()
        for flow, num_pages in self._held():
            by_tenant[flow.tenant] += num_pages
            by_answer[flow] += num_pages
            num_long += 0 if self._is_short(num_pages) else num_pages
        for is_short in (True, False):
            if any(self._is_short(one.num_pages) == is_short for one in self._having_turns):
                continue
            fitting = [
                waiting
                for waiting in self._waiting
                if self._is_short(waiting.num_pages) == is_short
                and not waiting.turn.cancelled()
                and self._fits(by_tenant[waiting.flow.tenant], waiting.num_pages, TENANT_SHARE)
                and self._fits(by_answer[waiting.flow], waiting.num_pages, ANSWER_SHARE)
            ]
            if not fitting:
                continue
            first = min(fitting, key=lambda one: (by_tenant[one.flow.tenant], by_answer[one.flow]))
            # No other long prompt goes before the first one, which might otherwise never have room.
            if is_short or self._fits(num_long, first.num_pages, LONG_SHARE):
                self._waiting.remove(first)
                self._having_turns.append(first)
                first.turn.set_result(None)

    def _is_short(self, num_pages: int) -> bool:
        return num_pages <= max(1, _LONGEST_SHORT_SHARE * self._num_pages)

    def _fits(self, num_held: int, num_pages: int, share: float) -> bool:
        return not num_held or num_held + num_pages <= share * self._num_pages
