"""The worker process: `python -m workers.process.service`, started by the supervisor.

The worker loads the model once, then lives in *sessions*. A session is the time with one messenger, with the
Conductor or the previous stage, and with the next stage or the other ranks if there are any. When one of
these peers is lost, all work of the session ends, and the worker begins the next session by registering anew.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
from typing import TYPE_CHECKING

from mooncake.errors import PoolError
from mooncake.leadership.leaders import Leaders, following
from mooncake.messages.blocks import KVLayout
from mooncake.model.checkpoint import kv_layout, open_checkpoint
from mooncake.node.process import child_main, drain_on_sigterm, stop
from mooncake.node.process_config import WorkerProcess
from mooncake.tracing.opening import open_tracer
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.loading import load_executor
from workers.execution.pass_record import PassRecord
from workers.process.metrics_listener import ListenerState, listening
from workers.process.rank_session import RankSession
from workers.process.retirement import Retirement
from workers.process.returning import say_returning
from workers.process.session import LeaderSession
from workers.process.stage_session import StageSession

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
log = logging.getLogger(__name__)


async def serve(process: WorkerProcess) -> None:
    """Load the model, then serve sessions until cancelled. Each session is an incarnation of its own."""
    config, record = process.config, PassRecord(process.pass_record_fd)
    checkpoint = await asyncio.to_thread(open_checkpoint, config.model, config.load_format)
    dtype = checkpoint.dtype_of(config.dtype)
    layout = kv_layout(checkpoint, config.kvcache.block_size, dtype)
    fingerprint = checkpoint.fingerprint(dtype, config.kvcache.block_size)
    status, retirement = ListenerState(process.role), Retirement()
    tracer = open_tracer(config.tracing, process.part)
    async with contextlib.AsyncExitStack() as stack:
        if tracer is not None:
            stack.enter_context(tracer.exporting())
        leaders = await stack.enter_async_context(following(config.cluster, config.conductor))
        async with asyncio.TaskGroup() as group:
            group.create_task(say_returning(process, leaders, record.take()))
            executor = await asyncio.to_thread(load_executor, checkpoint, layout, process, record)
        leads = process.stage.number == 0 and process.rank.number == 0
        if leads:
            drain_on_sigterm(retirement.wanted.set, config.worker.drain_timeout_s)
        if config.worker.metrics_listen is not None and leads:
            name = config.served_model_name or checkpoint.name
            stack.enter_context(listening(config.worker.metrics_listen, name, status))
        await _serve_sessions(process, executor, layout, fingerprint, status, retirement, leaders, tracer)


async def _serve_sessions(
    process: WorkerProcess,
    executor: Executor,
    layout: KVLayout,
    fingerprint: str,
    status: ListenerState,
    retirement: Retirement,
    leaders: Leaders,
    tracer: "Tracer | None",
) -> None:
    retry_s = FIRST_RETRY_S
    for incarnation in itertools.count(process.incarnation):
        session: LeaderSession | StageSession
        executor.record.clear()
        if process.rank.number:
            session = RankSession(process, incarnation, executor, layout, fingerprint, tracer)
        elif process.stage.number:
            session = StageSession(process, incarnation, executor, layout, fingerprint, tracer)
        else:
            session = LeaderSession(
                process, incarnation, executor, layout, fingerprint, status, retirement, leaders, tracer
            )
        try:
            await session.run()
        except (SessionLostError, PoolError) as error:
            this_task = asyncio.current_task()
            if this_task is not None and this_task.cancelling():
                raise asyncio.CancelledError from None  # the messenger was only quicker to stop than we are
            if retirement.wanted.is_set():
                stop()
            log.warning("%s; all its work has ended, registering again", error)
            retry_s = FIRST_RETRY_S if session.is_registered else min(2 * retry_s, LONGEST_RETRY_S)
        del session
        gc.collect()  # its parts refer to each other, and have memory and connections
        await asyncio.sleep(retry_s)


if __name__ == "__main__":
    child_main(WorkerProcess, serve)
