"""The order in which short bodies are read in the event loop: tenants take turns.

Reading a body takes milliseconds, and the bodies of many connections can arrive at once. A few are read in
each turn of the event loop, so that streams and other tenants wait for these alone.

Owns: that order. Does not know: how a body is read.
"""

import asyncio
from collections import OrderedDict, deque
from typing import NamedTuple

MAX_BYTES_AT_ONCE = 8192
"""Bytes of bodies that are read in one turn of the event loop."""


class _Waiting(NamedTuple):
    num_bytes: int
    may_read: asyncio.Future[None]


class ReadingOrder:
    """The order of one event loop's bodies. Needs a running event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Bodies by tenant, the tenant whose turn is next first."""
        self._num_bytes = 0
        """Bytes of the bodies that this turn of the event loop reads."""
        self._is_due = False

    async def turn(self, tenant: str, num_bytes: int) -> None:
        """Wait until a body of this size may be read, which the caller does before it waits for anything."""
        if not self._waiting and self._takes(num_bytes):
            return
        waiting = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiting)
        await waiting.may_read

    def _takes(self, num_bytes: int) -> bool:
        """Return whether this turn of the event loop reads a body of this size as well."""
        if self._num_bytes and self._num_bytes + num_bytes > MAX_BYTES_AT_ONCE:
            return False
        self._num_bytes += num_bytes
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        return True

    def _next_turn(self) -> None:
        self._is_due, self._num_bytes = False, 0
        while self._waiting:
            tenant, bodies = next(iter(self._waiting.items()))
            if not bodies[0].may_read.done():  # else the client has gone
                if not self._takes(bodies[0].num_bytes):
                    return
                bodies[0].may_read.set_result(None)
            bodies.popleft()
            self._waiting.move_to_end(tenant)
            if not bodies:
                del self._waiting[tenant]
