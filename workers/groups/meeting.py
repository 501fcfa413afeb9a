"""The process group of tensor-parallel ranks, for the time of one session.

All are on one node: they find each other in a file of the run directory, which is its user's alone, and
compute over the loopback interface.

Owns: the way into a process group and out of it. Does not know: who leads.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import torch
import torch.distributed as dist

from mooncake.node.process_config import WorkerProcess
from workers.engine.process_group import join_group
from workers.execution.jobs import wait_to_end

_INTERFACE = "lo"
_TIMEOUTS_APART = 2
"""Peer timeouts after which a rank that others wait for is lost, should its pulse not tell before."""


@contextlib.asynccontextmanager
async def meeting(path: str, process: WorkerProcess, device: torch.device) -> AsyncIterator[None]:
    """Join the group that meets at `path`, a new one for each. Raises RankLost if not all come in time."""
    rank = process.rank
    store = dist.FileStore(path, rank.size)  # type: ignore[attr-defined]
    timeout_s = _TIMEOUTS_APART * process.config.conductor.peer_timeout_s
    group = join_group(store, rank.number, rank.size, device, interface=_INTERFACE, timeout_s=timeout_s)
    with contextlib.ExitStack() as stack:
        await wait_to_end(asyncio.ensure_future(asyncio.to_thread(stack.enter_context, group)))
        yield
