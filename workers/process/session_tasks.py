"""The tasks of a session, which end together when one of them notices that a peer is lost.

Owns: how a session ends. Does not know: its tasks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import ConfigError, PoolError
from workers.engine.tensor_parallel import RankLost
from workers.errors import EngineLostError, SessionLostError

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def session_tasks(pool: WorkerClient) -> AsyncIterator[asyncio.TaskGroup]:
    """Make a context with a group of tasks, one of which watches the messenger of `pool`.

    Raises one error, however many peers are lost: a `ConfigError` or `EngineLostError` if there is one,
    because the next session would fail with it too. Otherwise the error is a `SessionLostError`. Unexpected
    errors are raised as a group.
    """
    ended_by: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_watch(pool))
            yield group
    except* (SessionLostError, PoolError, RankLost) as errors:
        ended_by = SessionLostError(str(_first_of(errors)))
    except* (ConfigError, EngineLostError) as errors:
        ended_by = _first_of(errors)
    # Raised here and not above: before Python 3.11.4 the error would be wrapped in a group again.
    if ended_by is not None:
        raise ended_by


async def end_beside(task: asyncio.Task[None]) -> None:
    """Cancel a task that is in no group, and wait for its end. Its error is logged."""
    task.cancel()
    (failure,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(failure, Exception):
        log.error("%s has failed", task.get_name(), exc_info=failure)


def _first_of(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the first error in a group, which may contain further groups."""
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


async def _watch(pool: WorkerClient) -> None:
    await pool.closed.wait()
    raise SessionLostError("the messenger is gone")
