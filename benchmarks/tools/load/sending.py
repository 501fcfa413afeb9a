"""The event loop of one client process, which sends its share of a run's requests when they are due.

Owns: the schedule. Does not know: HTTP, other processes.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from benchmarks.tools.load.client import Client
from benchmarks.tools.load.outcomes import Outcome
from benchmarks.tools.load.sources import Plan, Planned, Run

OnOutcome = Callable[[Outcome], None]


class Sender:
    """The sender of share number `share` of `num_shares`: every `num_shares`-th request of the run."""

    def __init__(
        self,
        run: Run,
        client: Client,
        share: int,
        num_shares: int,
        on_sent: Callable[[], None],
        on_outcome: OnOutcome,
    ) -> None:
        self._run, self._client = run, client
        # Each client of a closed loop is in one process: if there are fewer, some processes send nothing.
        self._share, self._num_shares = share, min(num_shares, run.concurrency or num_shares)
        self._on_sent, self._on_outcome = on_sent, on_outcome
        self.plan = Plan(run)

    async def send_all(self, start_s: float) -> None:
        """Send requests from `start_s` (of `time.monotonic`) on, until each has an outcome.

        A cancelled call first reports the outcomes of the requests in flight. Raises TraceError.
        """
        if self._run.concurrency is None:
            await self._open_loop(start_s)
        else:
            await self._closed_loop(start_s, self._run.concurrency)

    def _mine(self) -> Iterator[Planned]:
        if self._share >= self._num_shares:
            return iter(())
        return (request for request in self.plan if request.number % self._num_shares == self._share)

    async def _open_loop(self, start_s: float) -> None:
        """Send each request when it is due.

        Requests do not wait for each other, so a slow server delays none.
        """
        async with asyncio.TaskGroup() as group:
            for request in self._mine():
                body = self._client.body(request)
                due_s = start_s + request.at_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._one(request, body, start_s, due_s))

    async def _closed_loop(self, start_s: float, concurrency: int) -> None:
        end_s = math.inf if self._run.duration_s is None else start_s + self._run.duration_s
        requests = self._mine()
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._share, concurrency, self._num_shares):
                group.create_task(self._user(requests, start_s, end_s))

    async def _user(self, requests: Iterator[Planned], start_s: float, end_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        for request in requests:
            body = self._client.body(request)
            due_s = time.monotonic()
            if due_s >= end_s or task.cancelling():
                return
            await self._one(request, body, start_s, due_s)

    async def _one(self, request: Planned, body: bytes, start_s: float, due_s: float) -> None:
        self._on_sent()
        self._on_outcome(await self._client.send(request, body, start_s, due_s))
