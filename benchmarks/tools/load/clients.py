"""The client processes, and the messages between them and the run's process.

Each process generates the whole load and sends its share of it, so that only outcomes pass between processes.
All processes begin a run at the same time of the machine's monotonic clock.

Owns: the processes and their messages. Does not know: what is sent, what outcomes mean.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from benchmarks.tools.load.client import Client
from benchmarks.tools.load.outcomes import Outcome, RunResult
from benchmarks.tools.load.sending import Sender
from benchmarks.tools.load.sources import Run
from mooncake.errors import MooncakeError

FLUSH_S = 0.2
HEAD_START_S = 0.2
"""Seconds from the order to start a run to the run's beginning."""
READY_TIMEOUT_S = 60.0


class ClientError(MooncakeError):
    """A client process has failed, or a server does not answer as it should."""


class _Ready(NamedTuple):
    pass


class _News(NamedTuple):
    num_sent: int
    outcomes: list[Outcome]


class _Done(NamedTuple):
    cpu_share: float
    num_too_long: int


class _Broken(NamedTuple):
    reason: str


class Clients:
    """A context manager of `num_processes` client processes, which carry out one run after the other."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for share in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=client_main, args=(theirs, share, num_processes), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(FLUSH_S)
            process.terminate()
            process.join()

    def run(self, run: Run, on_news: Callable[[RunResult], None], urls: Sequence[str] = ()) -> RunResult:
        """Carry out a run, and return its result when all requests have outcomes. Ctrl-C ends the run early.

        `on_news` gets the result so far whenever outcomes arrive. If there are `urls`, the processes are
        divided among these servers. Raises ClientError.
        """
        result = RunResult()
        for share, connection in enumerate(self._connections):
            connection.send(replace(run, url=urls[share % len(urls)]) if urls else run)
        for connection in self._connections:
            if not connection.poll(READY_TIMEOUT_S):
                raise ClientError(f"a client process was not ready within {READY_TIMEOUT_S:g} s")
            _received(connection)
        start_s = time.monotonic() + HEAD_START_S
        for connection in self._connections:
            connection.send(start_s)
        pending = list(self._connections)
        try:
            self._gather(pending, result, on_news)
        except KeyboardInterrupt:
            result.was_interrupted = True
            for connection in pending:
                with contextlib.suppress(OSError):
                    connection.send(None)
            self._gather(pending, result, on_news)
        result.wall_s = result.sending_s = max(0.0, time.monotonic() - start_s)
        if run.concurrency is None and not result.was_interrupted:
            last_s = max((outcome.scheduled_s for outcome in result.outcomes), default=0.0)
            result.sending_s = run.duration_s or last_s
        return result

    def _gather(
        self, pending: list[Connection], result: RunResult, on_news: Callable[[RunResult], None]
    ) -> None:
        """Receive outcomes until all `pending` processes have finished."""
        while pending:
            for connection in wait(pending):
                assert isinstance(connection, Connection)
                match _received(connection):
                    case _News(num_sent, outcomes):
                        result.num_sent += num_sent
                        result.outcomes += outcomes
                    case _Done(cpu_share, num_too_long):
                        result.cpu_shares.append(cpu_share)
                        result.num_too_long = max(
                            result.num_too_long, num_too_long
                        )  # each process sees the whole load
                        pending.remove(connection)
            on_news(result)


def _received(connection: Connection) -> object:
    """Return the next message of a client process. Raises ClientError."""
    try:
        message = connection.recv()
    except (EOFError, OSError):
        raise ClientError("a client process died") from None
    if isinstance(message, _Broken):
        raise ClientError(message.reason)
    return message


def client_main(connection: Connection, share: int, num_shares: int) -> None:
    """Run a client process until its parent ends. The process sends share number `share` of `num_shares`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        while True:
            run = connection.recv()
            try:
                asyncio.run(_ClientProcess(connection, share, num_shares).do(run))
            except* MooncakeError as errors:
                connection.send(_Broken(_first_of(errors)))


def _first_of(errors: BaseExceptionGroup[BaseException]) -> str:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else str(first)


class _ClientProcess:
    """One run in a client process."""

    def __init__(self, connection: Connection, share: int, num_shares: int) -> None:
        self._connection = connection
        self._share, self._num_shares = share, num_shares
        self._num_sent = 0
        self._outcomes: list[Outcome] = []

    async def do(self, run: Run) -> None:
        async with Client(run) as client:
            sender = Sender(
                run, client, self._share, self._num_shares, self._count_sent, self._outcomes.append
            )
            self._connection.send(_Ready())
            start_s: float = await asyncio.to_thread(self._connection.recv)
            started_s, cpu_s = time.monotonic(), time.process_time()
            sending = asyncio.create_task(sender.send_all(start_s))
            flushing = asyncio.create_task(self._flush_regularly())
            loop = asyncio.get_running_loop()
            loop.add_reader(self._connection.fileno(), self._stop, sending)
            try:
                await asyncio.wait([sending])
            finally:
                loop.remove_reader(self._connection.fileno())
                flushing.cancel()
            self._flush()
            if not sending.cancelled():
                sending.result()
            cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - started_s)
            self._connection.send(_Done(cpu_share, sender.plan.num_too_long))

    def _stop(self, sending: asyncio.Task[None]) -> None:
        """End the sending, because the parent has ordered it or has ended."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        with contextlib.suppress(EOFError, OSError):
            self._connection.recv()
        sending.cancel()

    def _count_sent(self) -> None:
        self._num_sent += 1

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._flush()

    def _flush(self) -> None:
        if self._num_sent or self._outcomes:
            self._connection.send(_News(self._num_sent, list(self._outcomes)))
            self._num_sent = 0
            self._outcomes.clear()
