"""However a session ends, it does so with one error that says whether another one may begin."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.errors import ConfigError, PoolError
from workers.engine.tensor_parallel import RankLost
from workers.errors import EngineLostError, SessionLostError
from workers.process.session_tasks import end_beside, session_tasks

LOST, REFUSED = SessionLostError("stage 1 is gone"), ConfigError("the conductor refused p")


async def fails(*errors: Exception) -> None:
    """With one of them, or as a group of tasks does."""
    if len(errors) == 1:
        raise errors[0]
    raise ExceptionGroup("several", errors)


async def session(
    *tasks: Coroutine[Any, Any, None], body: Exception | None = None, has_messenger: bool = True
) -> None:
    """Has these tasks, and ends by itself only with `body`."""
    pool: Any = SimpleNamespace(closed=asyncio.Event())
    if not has_messenger:
        pool.closed.set()
    async with session_tasks(pool) as group:
        for task in tasks:
            group.create_task(task)
        if body is not None:
            raise body
        await asyncio.Event().wait()


async def test_lost_messenger_ends_a_session() -> None:
    with pytest.raises(SessionLostError, match="the messenger is gone"):
        await session(has_messenger=False)


@pytest.mark.parametrize("error", [LOST, PoolError("the messenger is silent"), RankLost("rank 1 is gone")])
async def test_whoever_is_lost_ends_a_session_with_one_error(error: Exception) -> None:
    for ending in (
        session(fails(error)),
        session(fails(error), fails(LOST)),
        session(fails(error), body=LOST),
        session(fails(error, LOST)),
        session(body=error),
    ):
        with pytest.raises(SessionLostError):
            await ending


@pytest.mark.parametrize("error", [REFUSED, EngineLostError("vLLM has ended")])
async def test_what_another_session_would_not_mend_counts_more_than_who_is_lost(error: Exception) -> None:
    for ending in (
        session(fails(error)),
        session(fails(error), fails(error)),
        session(fails(LOST), fails(error)),
        session(fails(LOST), body=error),
        session(fails(LOST, error)),
    ):
        with pytest.raises(type(error), match=str(error)):
            await ending


async def test_error_of_ours_is_not_taken_for_a_lost_session() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await session(fails(LOST), fails(KeyError("k")))
    assert caught.value.subgroup(KeyError) is not None


async def test_session_that_is_cancelled_has_not_been_lost() -> None:
    running = asyncio.create_task(session())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_error_of_a_task_beside_the_group_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failing = asyncio.create_task(fails(OSError("no socket")), name="telling")
    await asyncio.wait([failing])
    await end_beside(failing)
    assert "telling has failed" in caplog.text
    assert "no socket" in caplog.text


async def test_a_task_beside_the_group_ends_with_the_session(caplog: pytest.LogCaptureFixture) -> None:
    waiting = asyncio.create_task(asyncio.sleep(3600))
    await asyncio.sleep(0)
    await end_beside(waiting)
    assert waiting.cancelled()
    assert caplog.text == ""
