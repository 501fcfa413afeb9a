"""Tasks of a runner by the work that they do."""

import asyncio

from mooncake.messages.requests import Ref
from workers.execution.jobs import Jobs


async def test_work_that_is_cancelled_before_its_first_turn_is_not_called() -> None:
    called = []

    async def work(name: str) -> None:
        called.append(name)

    async with asyncio.TaskGroup() as group:
        jobs = Jobs(group)
        for name in ("cancelled", "done"):
            jobs.start(Ref(1, name, 1), lambda name=name: work(name))  # type: ignore[misc]
        jobs.cancel(Ref(1, "cancelled", 1))
    assert jobs.refs == []
    assert called == ["done"]
