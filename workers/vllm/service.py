"""The worker of an instance whose engine is vLLM: `python -m workers.vllm.service`.

The worker runs vLLM's server, and ends when the server ends; then the supervisor starts both again. Model,
layout and keys are those of this project's own workers, so both kinds of workers may serve in one cluster.

Owns: the process. Does not know: orders.
"""

import asyncio
import contextlib
import itertools
import logging
import sys

from mooncake.errors import PoolError
from mooncake.leadership.leaders import following
from mooncake.model.checkpoint import kv_layout, open_checkpoint
from mooncake.node.process import child_main, drain_on_sigterm, first_message, stop
from mooncake.node.process_config import WorkerProcess
from mooncake.tracing.opening import open_tracer
from workers.errors import EngineLostError, SessionLostError
from workers.process.metrics_listener import ListenerState, listening
from workers.process.retirement import Retirement
from workers.process.returning import say_returning
from workers.vllm.server import running
from workers.vllm.session import VllmSession

_RETRY_S = 0.5
log = logging.getLogger(__name__)


async def serve(process: WorkerProcess) -> None:
    """Start vLLM, then serve sessions until cancelled. Each session is an incarnation of its own."""
    config = process.config
    checkpoint = await asyncio.to_thread(open_checkpoint, config.model, config.load_format)
    dtype = checkpoint.dtype_of(config.dtype)
    layout = kv_layout(checkpoint, config.kvcache.block_size, dtype)
    fingerprint = checkpoint.fingerprint(dtype, config.kvcache.block_size)
    status, retirement = ListenerState(process.role), Retirement()
    tracer = open_tracer(config.tracing, process.part)
    async with contextlib.AsyncExitStack() as stack:
        leaders = await stack.enter_async_context(following(config.cluster, config.conductor))
        await say_returning(process, leaders, [])
        server = await stack.enter_async_context(running(process))
        drain_on_sigterm(retirement.wanted.set, config.worker.drain_timeout_s)
        if tracer is not None:
            stack.enter_context(tracer.exporting())
        if config.worker.metrics_listen is not None:
            name = config.served_model_name or checkpoint.name
            stack.enter_context(listening(config.worker.metrics_listen, name, status))
        for incarnation in itertools.count(process.incarnation):
            session = VllmSession(
                process, incarnation, server, layout, fingerprint, status, retirement, leaders, tracer
            )
            try:
                await session.run()
            except (SessionLostError, PoolError) as error:
                if retirement.wanted.is_set():
                    stop()
                log.warning("%s; all its work has ended, registering again", error)
                await asyncio.sleep(_RETRY_S)


def main() -> None:
    """Run this process.

    If vLLM is lost, the process ends with one line, because vLLM's own log has the details.
    """
    lost = None
    try:
        child_main(WorkerProcess, serve)
    except* EngineLostError as errors:
        lost = first_message(errors)
    sys.exit(lost)


if __name__ == "__main__":
    main()
