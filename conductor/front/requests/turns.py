"""The order in which bodies are read in the event loop: tenants take turns.

Reading a body takes milliseconds, and the bodies of many connections can arrive at once. Only a few bodies
are read in each turn of the event loop, so that streams and other tenants do not wait for all of them. While
the Conductor in this process has too many unread messages, no body is read. The Conductor reads its messages
in order of arrival, so a long queue there would delay other tenants' requests and the front's heartbeats.

Owns: this order. Does not know: how a body is read, how far the Conductor is.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

MAX_BYTES_AT_ONCE = 8192
"""The most bytes of bodies that are read in one turn of the event loop."""
MAX_BODIES_AT_ONCE = 8
"""The most bodies that are read in one turn of the event loop. Each can submit a hundred choices."""


class _Waiting(NamedTuple):
    num_bytes: int
    may_read: asyncio.Future[None]


class ReadingOrder:
    """The order of one event loop's bodies. Needs a running event loop."""

    def __init__(self, must_wait: Callable[[], bool]) -> None:
        """Make an empty order.

        `must_wait` returns whether all bodies have to wait. While any body waits, it is called in each turn
        of the event loop.
        """
        self._must_wait = must_wait
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Waiting bodies by tenant. The turns of tenants come in this order."""
        self._is_due = False

    async def turn(self, tenant: str, num_bytes: int) -> None:
        """Wait until a body of this size may be read.

        The caller must read the body at once, before waiting for anything else.
        """
        waiting = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiting)
        self._schedule()
        await waiting.may_read

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._choose)

    def _choose(self) -> None:
        """Choose the bodies that the next turn of the event loop reads."""
        self._is_due, num_bytes, num_bodies = False, 0, 0
        while self._waiting and num_bodies < MAX_BODIES_AT_ONCE and not self._must_wait():
            tenant, bodies = next(iter(self._waiting.items()))
            body = bodies[0]
            if not body.may_read.done():  # else the client has gone
                if num_bytes and num_bytes + body.num_bytes > MAX_BYTES_AT_ONCE:
                    break
                num_bytes, num_bodies = num_bytes + body.num_bytes, num_bodies + 1
                body.may_read.set_result(None)
                self._waiting.move_to_end(tenant)
            bodies.popleft()
            if not bodies:
                del self._waiting[tenant]
        self._schedule()
