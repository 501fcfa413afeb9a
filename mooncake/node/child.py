"""A child of the supervisor: one process of the node, over all its incarnations.

Owns: the process, its pipes, the state and end of the current incarnation, the pause before the next one.
Does not know: who starts, restarts and ends a child (`mooncake.node.supervisor`), what the process does.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from mooncake.node.lives import Life, ProcessEnd, end_of, num_oom_kills
from mooncake.node.plan import ChildSpec
from mooncake.node.process import LOG_LEVEL_VARIABLE, STATUS_FD_VARIABLE, Alive, Ready, Status

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
"""The longest pause in seconds before a process is restarted. The first pause has `FIRST_BACKOFF_S`."""
NUM_LAST_LINES = 20
"""The number of last lines that are shown of a failed process's output."""
LONGEST_LINE_BYTES = 1 << 14

_status_decoder = msgspec.json.Decoder(Status)


class Child:
    """One supervised process, over all its incarnations."""

    def __init__(self, spec: ChildSpec, log_level: str) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.is_ready = False
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.num_missed_beats: int | None = None
        """The supervisor's beats since the child's last sign of life; None before the first sign."""
        self.end: ProcessEnd | None = None
        """Cause of the latest incarnation's end."""
        self.num_failed_starts = 0
        """Incarnations in a row that ended by their own fault before they were ready."""
        self.has_left = False
        """Whether the instance has left the cluster, so that the process is not started again."""
        self._log_level = log_level
        self._incarnation = 0
        self._hung = False
        self._signal: signal.Signals | None = None

    async def start(self) -> AsyncIterator[Status | str]:
        """Start one incarnation, and yield its status messages and output lines until it has ended."""
        self.is_ready, self.num_missed_beats, self._hung = False, None, False
        self.last_lines.clear()
        num_oom_kills_before = num_oom_kills()
        # Not a pipe of the process object, which would stay open for as long as a grandchild holds it.
        output_read, output_write = os.pipe()
        status_read, status_write = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.spec.module,
            self.spec.name,  # for people who look at processes
            stdin=asyncio.subprocess.PIPE,
            stdout=output_write,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(status_write, *self.spec.pass_fds),
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which ends them all
            env={**os.environ, STATUS_FD_VARIABLE: str(status_write), LOG_LEVEL_VARIABLE: self._log_level},
        )
        os.close(output_write)
        os.close(status_write)
        if self._signal is not None:
            self._send(self._signal)  # the signal came while the process was being started
        assert self.process.stdin is not None
        # stdin stays open: its end tells the child that the supervisor is gone.
        # Grows even when the clock is set back.
        self._incarnation = max(self._incarnation + 1, time.time_ns())
        life = Life(self._incarnation, self.end)
        self.process.stdin.write(self.spec.config(life).encode() + b"\n")
        queue: asyncio.Queue[Status | str | None] = asyncio.Queue()
        async with (
            _reading(output_read) as output,
            _reading(status_read) as statuses,
            asyncio.TaskGroup() as readers,
        ):
            readers.create_task(_forward(output, queue, _text))
            readers.create_task(_forward(statuses, queue, _status))
            for _ in range(2):
                while (item := await queue.get()) is not None:
                    if isinstance(item, Alive):
                        self.num_missed_beats = 0
                        continue
                    if isinstance(item, Ready):
                        self.is_ready = True
                    elif isinstance(item, str):
                        self.last_lines.append(item)
                    yield item
        returncode = await self.process.wait()
        num_killed = num_oom_kills() - num_oom_kills_before
        self.end = end_of(returncode, hung=self._hung, num_oom_kills=num_killed)
        if self.is_ready:
            self.num_failed_starts = 0
        elif self.end is ProcessEnd.FAILED:
            self.num_failed_starts += 1
        self.is_ready, self.num_missed_beats = False, None
        if self.spec.after_end is not None:
            await self.spec.after_end(life)

    @property
    def backoff_s(self) -> float:
        """The seconds before the next incarnation; only failed starts make them grow."""
        return min(FIRST_BACKOFF_S * 2.0 ** max(0, self.num_failed_starts - 1), LONGEST_BACKOFF_S)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the current incarnation, or to one that is being started."""
        self._signal = signum
        self._send(signum)

    def close_descriptors(self) -> None:
        """Close the descriptors kept for a next incarnation, such as that of a pool's memory."""
        for descriptor in self.spec.pass_fds:
            os.close(descriptor)

    def end_hung(self) -> str:
        """Kill the current incarnation, which hangs. Returns the process's state as the kernel names it."""
        assert self.process is not None
        self._hung = True
        doing = _state(self.process.pid)
        self._send(signal.SIGKILL)
        return doing

    def _send(self, signum: int) -> None:
        """Send a signal by pid.

        `process.send_signal` could collect the exit code, for which asyncio is waiting already.
        """
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)


def _state(pid: int) -> str:
    """Return a process's state, such as `T (stopped)`, `S (sleeping)`, `D (disk sleep)`, `R (running)`."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("State:")).removeprefix("State:").strip()
    return "gone"


@contextlib.asynccontextmanager
async def _reading(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """Make a context with a reader of a pipe, which is closed at the context's end.

    It is closed even if another process still holds its other end.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        yield reader
    finally:
        transport.close()


async def _forward(
    reader: asyncio.StreamReader,
    queue: asyncio.Queue[Status | str | None],
    parse: Callable[[bytes], Status | str],
) -> None:
    """Put every parsed line into `queue`, then None at the end.

    A line longer than `LONGEST_LINE_BYTES` loses bytes, and its later part may count as another line.
    """
    rest = b""
    while data := await reader.read(LONGEST_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            queue.put_nowait(parse(line[:LONGEST_LINE_BYTES]))
    if rest:
        queue.put_nowait(parse(rest))
    queue.put_nowait(None)


def _text(line: bytes) -> str:
    return line.decode(errors="replace")


def _status(line: bytes) -> Status | str:
    try:
        status: Status = _status_decoder.decode(line)
    except msgspec.MsgspecError:
        return _text(line)  # shown as it is, rather than lost
    return status
