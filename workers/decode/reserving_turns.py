"""Who reserves pages of the pool next at a decode instance: equal parts for tenants, and for their answers.

A reserved prompt holds its pages until its sequence joins the batch, which may be long after its prefill. So
a tenant's prompts hold at most a part of the pool, and an answer's a smaller one: the rest is headroom for
others, who need not wait until a batch has gone through what stands before them. Of those that wait the one
goes first whose tenant, and whose answer, holds least; then the first that came.

Owns: that order. Does not know: how pages are reserved, what they hold.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mooncake.messages.requests import Flow

TENANT_SHARE = 0.75
"""of the pool's pages that a tenant's reserved prompts hold at most, unless it is a single one"""
ANSWER_SHARE = 0.5
"""the same of one answer"""


@dataclass(slots=True, eq=False)
class _Waiting:
    flow: Flow
    num_pages: int
    turn: asyncio.Future[None]


class ReservingTurns:
    """One at a time. `held` says how many pages which reserved prompts hold."""

    def __init__(self, num_pages: int, held: Callable[[], Iterable[tuple[Flow, int]]]) -> None:
        self._num_pages, self._held = num_pages, held
        self._waiting: list[_Waiting] = []
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, flow: Flow, num_pages: int) -> AsyncIterator[None]:
        """Wait for the turn of a prompt of so many pages; it lasts until this is left."""
        waiting = _Waiting(flow, num_pages, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            self.look_again()
            await waiting.turn
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._is_taken = False
            self.look_again()

    def look_again(self) -> None:
        """Pages have been released."""
        if self._is_taken or not self._waiting:
            return
        by_tenant: Counter[str] = Counter()
        by_answer: Counter[Flow] = Counter()
        for flow, num_pages in self._held():
            by_tenant[flow.tenant] += num_pages
            by_answer[flow] += num_pages
        fitting = [
            waiting
            for waiting in self._waiting
            if not waiting.turn.cancelled()
            and self._fits(by_tenant[waiting.flow.tenant], waiting.num_pages, TENANT_SHARE)
            and self._fits(by_answer[waiting.flow], waiting.num_pages, ANSWER_SHARE)
        ]
        if fitting:
            first = min(fitting, key=lambda one: (by_tenant[one.flow.tenant], by_answer[one.flow]))
            self._waiting.remove(first)
            self._is_taken = True
            first.turn.set_result(None)

    def _fits(self, num_held: int, num_pages: int, share: float) -> bool:
        return not num_held or num_held + num_pages <= share * self._num_pages
