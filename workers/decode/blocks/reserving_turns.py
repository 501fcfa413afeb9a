"""The order in which prompts reserve pool pages at a decode instance: fair shares of the pool.

A reserved prompt holds its pages until its sequence joins the batch, which may be long after its prefill. So
the prompts of a tenant hold at most a share of the pool, and those of an answer a smaller share. The rest is
headroom for other tenants, which need not wait until the batch has served all prompts before theirs. Of the
waiting prompts, the one with which its tenant would hold least goes first, so that a short one does not wait
for the long ones of many tenants; then the one whose answer holds least, then the oldest. All others together
leave room for short ones.

Owns: that order. Does not know: how pages are reserved, what they hold.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mooncake.messages.requests import Flow

TENANT_SHARE = 0.75
"""The share of the pool's pages that a tenant's reserved prompts hold at most; a single prompt may hold
more."""
ANSWER_SHARE = 0.5
"""The share of the pool's pages that an answer's reserved prompts hold at most; a single prompt may hold
more."""

SHORT_SHARE = 1 / 8
"""The share of the pool's pages that is left to short prompts."""
_LONGEST_SHORT_SHARE = 1 / 64
"""The share of the pool's pages that a short prompt has at most."""


@dataclass(slots=True, eq=False)
class _Waiting:
    flow: Flow
    num_pages: int
    turn: asyncio.Future[None]


class ReservingTurns:
    """The turns in which prompts reserve pages, one at a time.

    `held` yields the flow and pages of each reserved prompt.
    """

    def __init__(self, num_pages: int, held: Callable[[], Iterable[tuple[Flow, int]]]) -> None:
        self._num_pages, self._held = num_pages, held
        self._waiting: list[_Waiting] = []
        self._is_taken = False

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
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._is_taken = False
            self.recheck()

    def recheck(self) -> None:
        """Give a waiting prompt its turn, if no other prompt has it.

        To be called when pages have been released.
        """
        if self._is_taken or not self._waiting:
            return
        by_tenant: Counter[str] = Counter()
        by_answer: Counter[Flow] = Counter()
        for flow, num_pages in self._held():
            by_tenant[flow.tenant] += num_pages
            by_answer[flow] += num_pages
        num_held = by_tenant.total()
        fitting = [
            waiting
            for waiting in self._waiting
            if not waiting.turn.cancelled()
            and (self._is_short(waiting) or self._fits(num_held, waiting.num_pages, 1 - SHORT_SHARE))
            and self._fits(by_tenant[waiting.flow.tenant], waiting.num_pages, TENANT_SHARE)
            and self._fits(by_answer[waiting.flow], waiting.num_pages, ANSWER_SHARE)
        ]
        if fitting:
            first = min(
                fitting, key=lambda one: (by_tenant[one.flow.tenant] + one.num_pages, by_answer[one.flow])
            )
            self._waiting.remove(first)
            self._is_taken = True
            first.turn.set_result(None)

    def _is_short(self, waiting: _Waiting) -> bool:
        return waiting.num_pages <= _LONGEST_SHORT_SHARE * self._num_pages

    def _fits(self, num_held: int, num_pages: int, share: float) -> bool:
        return not num_held or num_held + num_pages <= share * self._num_pages
