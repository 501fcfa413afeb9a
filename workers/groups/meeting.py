"""The process group of tensor-parallel ranks during one session.

All ranks are on one node. They find each other through a file in the run directory, which only their user can
access, and communicate over the loopback interface.

Owns: joining and leaving a process group. Does not know: which rank leads.
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
"""The number of peer timeouts for which a rank waits for other ranks in the process group.

The links between ranks usually show a loss earlier.
"""


@contextlib.asynccontextmanager
async def meeting(path: str, process: WorkerProcess, device: torch.device) -> AsyncIterator[None]:
    """Make a context in which this rank is in the process group that meets through the file `path`.

    Each group needs a new file. Raises RankLost if not all ranks join in time.
    """
    rank = process.rank
    store = dist.FileStore(path, rank.size)  # type: ignore[attr-defined]
    timeout_s = _TIMEOUTS_APART * process.config.conductor.peer_timeout_s
    group = join_group(store, rank.number, rank.size, device, interface=_INTERFACE, timeout_s=timeout_s)
    with contextlib.ExitStack() as stack:
        await wait_to_end(asyncio.ensure_future(asyncio.to_thread(stack.enter_context, group)))
        yield
