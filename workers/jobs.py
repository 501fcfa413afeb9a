"""Tasks of a runner by the work that they do, so that each can be cancelled and none is forgotten."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mooncake.messages import Ref

T = TypeVar("T")


class Jobs:
    """Runs coroutines in a `TaskGroup`, one a `Ref`; an unexpected error in one ends the group."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[Ref, asyncio.Task[None]] = {}

    @property
    def refs(self) -> list[Ref]:
        """What is being worked on."""
        return list(self._tasks)

    def start(self, ref: Ref, work: Coroutine[Any, Any, None]) -> None:
        """Start the work named `ref`; a name is used once."""
        task = self._group.create_task(work, name=f"{ref.request_id}/{ref.attempt}")
        self._tasks[ref] = task
        task.add_done_callback(lambda _: self._tasks.pop(ref, None))

    def cancel(self, ref: Ref) -> None:
        """Cancel the work, once; unknown work has just ended."""
        task = self._tasks.get(ref)
        if task is not None and not task.cancelling():
            task.cancel()


async def see_out(ended: "asyncio.Future[T]", on_cancel: Callable[[], None] | None = None) -> T:
    """The result of what another thread does.

    A cancelled caller calls `on_cancel`, and leaves when it has ended: only then may the memory that it uses
    be given back.
    """
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # retrieved: nobody else will
        raise
