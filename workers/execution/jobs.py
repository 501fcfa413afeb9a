"""Tasks of a runner by the work that they do, so that each can be cancelled and none is forgotten."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mooncake.errors import MooncakeError
from mooncake.messages.requests import Ref
from workers.engine.tensor_parallel import RankLost
from workers.execution.pass_record import PassRecord

T = TypeVar("T")
U = TypeVar("U")


class Jobs:
    """Runs coroutines in a `TaskGroup`, one a `Ref`; an unexpected error in one ends the group, and `record`
    says whose work it was."""

    def __init__(self, group: asyncio.TaskGroup, record: PassRecord | None = None) -> None:
        self._group, self._record = group, record or PassRecord()
        self._tasks: dict[Ref, asyncio.Task[None]] = {}

    @property
    def refs(self) -> list[Ref]:
        """What is being worked on."""
        return list(self._tasks)

    def start(self, ref: Ref, work: Callable[[], Awaitable[None]]) -> None:
        """Start the work named `ref`; a name is used once. `work` is not called if it is cancelled before."""
        task = self._group.create_task(self._do(ref, work), name=f"{ref.request_id}/{ref.attempt}")
        self._tasks[ref] = task
        task.add_done_callback(lambda _: self._tasks.pop(ref, None))

    async def _do(self, ref: Ref, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (MooncakeError, RankLost):
            raise
        except Exception:
            self._record.blame([ref])
            raise

    def cancel(self, ref: Ref) -> None:
        """Cancel the work, once; unknown work has just ended."""
        task = self._tasks.get(ref)
        if task is not None and not task.cancelling():
            task.cancel()


def is_cancelled() -> bool:
    """Whether somebody wants the current task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def together(own: Awaitable[T], others: Awaitable[U]) -> tuple[T, U]:
    """Both, side by side. When one fails, or the caller is cancelled, the other is cancelled; this is left
    when both have ended. Raises what failed first."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(own), asyncio.ensure_future(others)]

    def stop() -> None:
        for task in tasks:
            task.cancel()

    async def settled() -> None:
        _, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if late:
            stop()
            await asyncio.wait(late)

    try:
        await see_out(asyncio.ensure_future(settled()), on_cancel=stop)
    finally:
        errors = [task.exception() for task in tasks if not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    return tasks[0].result(), tasks[1].result()


async def see_out(ended: "asyncio.Future[T]", on_cancel: Callable[[], object] | None = None) -> T:
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
