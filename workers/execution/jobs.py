"""The tasks of requests. The task of a given request can be cancelled.

Owns: these tasks, and waiting for several of them. Does not know: what they do.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from mooncake.errors import MooncakeError
from mooncake.messages.requests import Ref
from workers.engine.tensor_parallel import RankLost
from workers.execution.pass_record import PassRecord

T = TypeVar("T")
U = TypeVar("U")


class Jobs:
    """The tasks of a runner, one for each attempt (`Ref`).

    An unexpected error ends the task group, and `record` then names the request.
    """

    def __init__(self, group: asyncio.TaskGroup, record: PassRecord | None = None) -> None:
        self._group, self._record = group, record or PassRecord()
        self._tasks: dict[Ref, asyncio.Task[None]] = {}

    @property
    def refs(self) -> list[Ref]:
        """The attempts whose tasks have not ended."""
        return list(self._tasks)

    @property
    def going_on(self) -> list[Ref]:
        """The attempts whose tasks have neither ended nor been cancelled."""
        return [ref for ref, task in self._tasks.items() if not task.cancelling()]

    def start(self, ref: Ref, work: Callable[[], Awaitable[None]]) -> None:
        """Start the work of the attempt `ref`. Each `ref` is started once.

        `work` is not called if the task is cancelled before it begins.
        """
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
        """Cancel the work of the attempt `ref`; a second call has no effect.

        An unknown `ref` is ignored, because its work has just ended.
        """
        task = self._tasks.get(ref)
        if task is not None and not task.cancelling():
            task.cancel()


def is_cancelled() -> bool:
    """Return whether the current task has been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def together(own: Awaitable[T], others: Awaitable[U]) -> tuple[T, U]:
    """Run two awaitables concurrently, and return or raise when both have ended.

    If an awaitable fails, or the caller is cancelled, all awaitables that still run are cancelled. Raises the
    first error.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(own), asyncio.ensure_future(others)]

    def stop() -> None:
        for task in tasks:
            task.cancel()

    first, second = await results_of(tasks, stop)
    return first, second


async def results_of(futures: Sequence[asyncio.Future[T]], stop: Callable[[], object]) -> list[T]:
    """Wait until all futures have ended, and return their results in the order of `futures`.

    `stop` is called when a future fails, or the caller is cancelled; it must make all futures end soon.
    Raises an error if futures have failed: that of the first one in the order of `futures`.
    """

    async def settled() -> None:
        _, late = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        if late:
            stop()
            await asyncio.wait(late)

    try:
        await wait_to_end(asyncio.ensure_future(settled()), on_cancel=stop)
    finally:
        errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


async def wait_to_end(ended: "asyncio.Future[T]", on_cancel: Callable[[], object] | None = None) -> T:
    """Wait until the work behind the future `ended` has ended, and return its result.

    When the caller is cancelled, `on_cancel` is called, and CancelledError is raised once the work has ended:
    only then may the memory that the work uses be freed.
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
            ended.exception()  # retrieved here, else asyncio would log it
        raise
