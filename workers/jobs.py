"""Tasks of a runner by the work that they do, so that each can be cancelled and none is forgotten."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from mooncake.messages import Ref


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
