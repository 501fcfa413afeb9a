"""The tasks of a session, which end together: whichever of them finds out that somebody is gone.

Owns: how a session ends. Does not know: what its tasks do.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvstore.worker_client import WorkerClient
from mooncake.errors import ConfigError, PoolError
from workers.engine.tensor_parallel import RankLost
from workers.errors import SessionLostError


@contextlib.asynccontextmanager
async def session_tasks(pool: WorkerClient) -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks, one of which watches the messenger of `pool`.

    Raises one error, whatever ends in how many of them: `SessionLostError`, or `ConfigError` for what another
    session would not mend.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_watch(pool))
            yield group
    except* (SessionLostError, PoolError, RankLost) as errors:
        raise SessionLostError(str(errors.exceptions[0])) from None
    except* ConfigError as errors:
        raise errors.exceptions[0] from None


async def _watch(pool: WorkerClient) -> None:
    await pool.closed.wait()
    raise SessionLostError("the messenger is gone")
