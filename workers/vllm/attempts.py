"""The attempts of one session of a vLLM instance: each is a task whose failure is reported to the Conductor.

Owns: what becomes of errors. Does not know: prefill, decode.
"""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import MooncakeError, RequestError
from mooncake.messages.workers import Finished, Prefill, Prefilled, Reserve, Reserved, WorkFailed
from mooncake.tracing.spans import Attributes, EndedSpan, why_ended
from workers.errors import EngineLostError
from workers.execution.jobs import Jobs
from workers.vllm.server import VllmServer, check_served

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

log = logging.getLogger(__name__)
Send = Callable[[Reserved | Prefilled | Finished | WorkFailed], Awaitable[None]]


Order = Prefill | Reserve


class Attempts:
    """The running attempts of one session, and the objects that all attempts share."""

    def __init__(
        self, server: VllmServer, pool: WorkerClient, send: Send, jobs: Jobs, tracer: "Tracer | None" = None
    ) -> None:
        self.server, self.pool, self.send = server, pool, send
        self._jobs, self._tracer = jobs, tracer

    def start(self, order: Order, work: Callable[[], Awaitable[None]]) -> None:
        """Begin an attempt as a task.

        `Jobs.cancel` stops the attempt; then `work` must release everything.
        """
        self._jobs.start(order.ref, lambda: self._attempt(order, work))

    async def _attempt(self, order: Order, work: Callable[[], Awaitable[None]]) -> None:
        ref = order.ref
        try:
            with self._recorded(order):
                check_served(order.request.sampling)
                await work()
        except EngineLostError:
            raise
        except MooncakeError as error:
            if self.pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("%s failed: %s", ref.request_id, error)
            if isinstance(error, RequestError):
                failed = WorkFailed(ref, str(error), retryable=False, is_refused=True, param=error.param)
            else:
                failed = WorkFailed(ref, str(error), retryable=True)
            await self.send(failed)

    @contextlib.contextmanager
    def _recorded(self, order: Order) -> Iterator[None]:
        """Make a context that records the attempt's span, if its request is traced."""
        began_s, error = time.monotonic(), ""
        try:
            yield
        except BaseException as failure:
            error = why_ended(failure)
            raise
        finally:
            if self._tracer is not None and order.request.is_traced:
                name = "prefill" if isinstance(order, Prefill) else "decode"
                attributes: Attributes = {
                    "mooncake.instance": self.pool.address.instance,
                    "mooncake.request_id": order.ref.request_id,
                    "mooncake.attempt": order.ref.attempt,
                }
                span = EndedSpan(name, began_s, time.monotonic(), attributes, error=error)
                self._tracer.record(span, order.request.span)
