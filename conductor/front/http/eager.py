"""A coroutine that runs at once, in its caller's place, for as long as it need not wait.

A task costs a turn of the event loop before its first step. Where most coroutines never wait, as when a
token's event is written to a client that reads, that turn is most of what they cost.

Owns: how such a coroutine becomes a task when it waits after all. Does not know: what it does.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs `coroutine`; what it raises before it waits is raised here.

    None: it has ended. Else it waits, and the task goes on with it: it is the caller's to keep.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_Begun(coroutine, awaited))


class _Begun(Generator[Any, Any, None]):
    """A coroutine that waits for something, for a task that has not heard of that."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._untold = [awaited]

    def send(self, value: Any) -> Any:
        return self._untold.pop() if self._untold else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._untold.clear()
        return self._coroutine.throw(*error)

    def __await__(self) -> Generator[Any, Any, None]:
        return self
