"""What need not wait is over when the call returns; what waits is an ordinary task from then on."""

import asyncio

import pytest

from conductor.front.http.eager import run_eagerly


async def test_what_need_not_wait_is_over_at_once() -> None:
    done: list[str] = []

    async def quick() -> None:
        done.append("quick")

    assert run_eagerly(quick()) is None
    assert done == ["quick"]


async def test_what_waits_goes_on_as_a_task() -> None:
    done: list[object] = []
    gate, event = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def slow() -> None:
        done.append(await gate)
        await asyncio.sleep(0)
        await event.wait()
        done.append("end")

    task = run_eagerly(slow())
    assert task is not None
    gate.set_result("passed")
    event.set()
    await task
    assert done == ["passed", "end"]


async def test_errors_come_from_where_they_are_raised() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def failing(waits: bool) -> None:
        if waits:
            await gate
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        run_eagerly(failing(waits=False))
    task = run_eagerly(failing(waits=True))
    assert task is not None
    gate.set_result(None)
    with pytest.raises(ValueError, match="wrong"):
        await task


async def test_a_cancelled_task_cleans_up_and_may_wait_for_that() -> None:
    done: list[str] = []

    async def careful() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("clean")

    task = run_eagerly(careful())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["clean"]
