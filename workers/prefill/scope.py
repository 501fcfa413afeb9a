"""A scope of asynchronous work that another task can end with an error.

Owns: the delivery of an error to a waiting task. Does not know: which errors, where they come from.
"""

import asyncio
from types import TracebackType


class FailureScope:
    """A context, `async with scope:`, whose task another task can interrupt with an error (`fail`).

    It works like `asyncio.timeout`: the task is cancelled, and the cancellation becomes the error at the end.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._num_cancelling = 0
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Make the scope fail with `error`. Only the first error counts, and none after the scope's end."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    async def __aenter__(self) -> "FailureScope":
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancelling = task, task.cancelling()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._error is None:
            return
        is_only_ours = task.uncancel() <= self._num_cancelling
        if is_only_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error from None
