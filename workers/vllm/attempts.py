"""The attempts of one session of a vLLM instance: a task for each, whose failure is told to the Conductor.

Owns: what becomes of errors. Does not know: prefill, decode.
"""

import logging
from collections.abc import Awaitable, Callable

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import MooncakeError, RequestError
from mooncake.messages.requests import Ref, SamplingParams
from mooncake.messages.workers import Finished, Prefilled, Reserved, WorkFailed
from workers.errors import EngineLostError
from workers.execution.jobs import Jobs
from workers.vllm.server import VllmServer, check_served

log = logging.getLogger(__name__)
Send = Callable[[Reserved | Prefilled | Finished | WorkFailed], Awaitable[None]]


class Attempts:
    """Attempts with what all of them need."""

    def __init__(self, server: VllmServer, pool: WorkerClient, send: Send, jobs: Jobs) -> None:
        self.server, self.pool, self.send = server, pool, send
        self._jobs = jobs

    def start(self, ref: Ref, sampling: SamplingParams, work: Callable[[], Awaitable[None]]) -> None:
        """Begin an attempt. `Jobs.cancel` stops it; `work` then releases everything."""
        self._jobs.start(ref, lambda: self._attempt(ref, sampling, work))

    async def _attempt(self, ref: Ref, sampling: SamplingParams, work: Callable[[], Awaitable[None]]) -> None:
        try:
            check_served(sampling)
            await work()
        except EngineLostError:
            raise
        except MooncakeError as error:
            if self.pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("%s failed: %s", ref.request_id, error)
            await self.send(WorkFailed(ref, str(error), not isinstance(error, RequestError)))
