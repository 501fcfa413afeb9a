"""Processes for work that may take long.

Parsing, rendering, tokenizing and compiling hold the GIL, so in threads they would stop every stream.

The processes are forked, so that they have the model without reading it again. The front's process forks a
first process when it begins to serve. The first process has a single thread. It forks a process for each
queue when the queue's first task arrives. A queue's process that exceeds its limits is ended, and its task is
refused; the queue's next task gets a new process.

Owns: these processes, the order of tasks. Does not know: the work, what runs and limits a process
(`task_process`).
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conductor.front.errors import RETRY_AFTER_S
from conductor.front.requests.task_process import SIZE, TaskResult, Work, fork_first, packed, too_costly
from mooncake.errors import OverloadedError

MAX_WAITING = 256
MAX_WAITING_OF_TENANT = 64
"""The most tasks of one tenant that wait in a queue.

`MAX_WAITING` limits the tasks of all tenants together, including the task that runs.
"""
MAX_WAITING_BYTES, MAX_WAITING_BYTES_OF_TENANT = 64 << 20, 32 << 20
"""The most bytes of bodies that wait in a queue, of all tenants together and of one tenant.

One body of each tenant may always wait.
"""
_MAX_S = 120.0
"""Seconds after which a task is ended although it has not used up its processor time.

Such a task must hang: even on a busy machine, a task that computes uses up its processor time far sooner.
"""
_FORK_S = 30.0
"""Seconds for a fork by the first process. If a fork takes longer, the process counts as hung or stopped."""


class Queue(Enum):
    """The queues of tasks. Tasks of a queue run one after the other."""

    SHORT = "short bodies"
    LONG = "long bodies"
    GRAMMAR = "grammars"


Pieces = Sequence[bytes | bytearray]
"""Pieces of a body, each short enough to be copied in one turn of the event loop."""


class Offload:
    """A pool of processes for tasks. Tasks run only while `run` runs. Needs a running event loop."""

    def __init__(self, work: Mapping[Queue, Work]) -> None:
        """Fork the first process.

        No other thread may run now: the child would wait for ever for a lock that such a thread holds.
        """
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._pid = fork_first(other, list(work.values()))
        self._queues = {queue: _WorkQueue(number, self._new_process) for number, queue in enumerate(work)}

    async def run(self) -> None:
        """Run tasks until cancelled, then end the processes.

        Raises RuntimeError, in an ExceptionGroup, if the first process does not fork another one in time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for queue in self._queues.values():
                    group.create_task(queue.run())
        finally:
            self.close()

    def close(self) -> None:
        """End the first process. The kernel then ends the processes that this one has forked. Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.kill(self._pid, signal.SIGKILL)  # the process may be stopped, and has nothing to finish
            os.waitpid(self._pid, 0)

    async def do(self, queue: Queue, task: Any, tenant: str = "", body: Pieces = ()) -> TaskResult:
        """Return the result of the queue's work for `task`, which is small, and `body`, which may be large.

        Raises the error of the work, RequestError if the work exceeded its limits, or OverloadedError if too
        many tasks or bytes wait. If the caller is cancelled, a task that has not begun is dropped.
        """
        return await self._queues[queue].do(task, tenant, body)

    def num_waiting(self, queue: Queue, tenant: str) -> int:
        """Return the number of a tenant's tasks that wait in a queue."""
        return self._queues[queue].num_waiting_of(tenant)

    def _new_process(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            socket.send_fds(self._socket, [bytes([number])], [theirs.fileno()])
        return ours


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    value: Any
    body: Pieces
    num_bytes: int
    answered: asyncio.Future[TaskResult]


class _WorkQueue:
    """One queue: its process, and its waiting tasks. Tenants take turns, with one task in each turn."""

    def __init__(self, number: int, new_process: Callable[[int], socket.socket]) -> None:
        self._number, self._new_process = number, new_process
        self._waiting: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._has_come = asyncio.Event()
        self.num_waiting = 0
        self._num_bytes = 0
        """The number of bytes of the bodies that wait."""

    async def do(self, value: Any, tenant: str, body: Pieces) -> TaskResult:
        queue, num_bytes = self._waiting.setdefault(tenant, deque()), sum(map(len, body))
        if self.num_waiting >= MAX_WAITING or len(queue) >= MAX_WAITING_OF_TENANT:
            raise OverloadedError(f"{self.num_waiting} requests are being read", RETRY_AFTER_S)
        if queue and self._has_no_room(queue, num_bytes):
            raise OverloadedError(f"{self._num_bytes >> 20} MiB of requests wait to be read", RETRY_AFTER_S)
        task = _Task(value, body, num_bytes, asyncio.get_running_loop().create_future())
        queue.append(task)
        self.num_waiting += 1
        self._num_bytes += num_bytes
        self._has_come.set()
        try:
            return await task.answered
        except asyncio.CancelledError:  # the client has gone: a waiting task no longer counts
            if task in queue:
                queue.remove(task)
                self._num_bytes -= num_bytes
            raise
        finally:
            self.num_waiting -= 1

    def _has_no_room(self, queue: Iterable[_Task], num_bytes: int) -> bool:
        num_of_tenant = sum(task.num_bytes for task in queue)
        return (
            self._num_bytes + num_bytes > MAX_WAITING_BYTES
            or num_of_tenant + num_bytes > MAX_WAITING_BYTES_OF_TENANT
        )

    def num_waiting_of(self, tenant: str) -> int:
        return sum(not task.answered.done() for task in self._waiting.get(tenant, ()))

    async def run(self) -> None:
        while True:
            task = await self._next()
            process = await _Process.connect(self._new_process(self._number))
            with contextlib.closing(process):
                while await process.do(task):
                    del task  # frees the body, which may be large, before the wait for the next task
                    task = await self._next()
            del task

    async def _next(self) -> _Task:
        while True:
            while self._waiting:
                tenant, queue = next(iter(self._waiting.items()))
                self._waiting.move_to_end(tenant)
                task = queue.popleft() if queue else None
                if not queue:
                    del self._waiting[tenant]
                if task is not None:
                    self._num_bytes -= task.num_bytes
                if task is not None and not task.answered.done():
                    return task
            self._has_come.clear()
            await self._has_come.wait()


class _Process:
    """The connection to a queue's process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader, self._writer = reader, writer
        self._process = os.pidfd_open(pid)

    @classmethod
    async def connect(cls, connection: socket.socket) -> "_Process":
        """Return the connection once the process has been forked.

        Raises RuntimeError if the fork takes too long.
        """
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            async with asyncio.timeout(_FORK_S):
                pid = await reader.readexactly(SIZE.size)
        except TimeoutError:
            message = f"the process that forks others has not answered for {_FORK_S:g} s"
            raise RuntimeError(message) from None
        return cls(reader, writer, SIZE.unpack(pid)[0])

    async def do(self, task: _Task) -> bool:
        """Run a task in the process. Returns whether the process can run more tasks."""
        answer: TaskResult | Exception
        try:
            async with asyncio.timeout(_MAX_S):
                answer = await self._ask(task.value, task.body)
            is_well = True
        except (OSError, asyncio.IncompleteReadError):  # a TimeoutError is an OSError
            answer, is_well = too_costly(), False
        if not task.answered.done():
            if isinstance(answer, TaskResult):
                task.answered.set_result(answer)
            else:
                task.answered.set_exception(answer)
        return is_well

    async def _ask(self, value: Any, body: Pieces) -> TaskResult | Exception:
        for part in (*packed(value), SIZE.pack(sum(map(len, body)))):
            self._writer.write(part)
        await self._writer.drain()
        for piece in body:
            self._writer.write(piece)
            await self._writer.drain()
        head = await self._read()
        num_parts, answer = pickle.loads(head)
        parts = [await self._read() for _ in range(num_parts)]
        return TaskResult(answer.value, parts) if isinstance(answer, TaskResult) else answer

    async def _read(self) -> bytes:
        [size] = SIZE.unpack(await self._reader.readexactly(SIZE.size))
        return await self._reader.readexactly(size)

    def close(self) -> None:
        """End the process, even if it computes, hangs or is stopped."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        os.close(self._process)
