"""The processes of `offload`: how they are forked, what limits them, and the loop that runs tasks in them.

Owns: the limits of a process, the form in which tasks and results pass through its connection. Does not know:
the work, which task comes next, how many processes there are.
"""

import contextlib
import ctypes
import gc
import itertools
import math
import os
import pickle
import resource
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mooncake.errors import MooncakeError, RequestError

_MAX_CPU_S = 10
"""The processor seconds that one task may take."""
_MAX_NEW_BYTES = 1 << 30
"""The bytes of memory that a process may take beyond those with which it began."""
_NICE = 10
"""The nice value of the processes: beside a process that computes all the time they get a tenth of a core."""
SIZE = struct.Struct("<Q")
"""The format of a number on a connection: the bytes of the part behind it or, at first, the process id."""
_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class TaskResult(NamedTuple):
    """The result of a task.

    The event loop unpickles `value`, which is therefore small. `parts` are passed on as bytes, and may be
    large.
    """

    value: Any
    parts: Sequence[bytes] = ()


Work = Callable[[Any, bytes], TaskResult]
"""The function of a queue, called with a task and its body.

A MooncakeError that it raises is raised at the caller of `Offload.do`.
"""


def fork_first(control: socket.socket, work: Sequence[Work]) -> int:
    """Fork the first process, which forks the others. Returns the process id of the first one.

    Each message at `control` is an order to fork a process. The message has a queue's number, which is an
    index of `work`, and carries the socket over which the new process gets its tasks.
    """
    return _fork(lambda: _fork_for_queues(control, work), keep=[control])


def _fork(work: Callable[[], None], keep: Sequence[socket.socket]) -> int:
    """Run `work` in a forked child that has no descriptors but `keep` and stderr. Returns the child's id.

    The kernel kills the child when the thread that has called this function ends.
    """
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        gc.freeze()  # garbage must not close reused descriptors
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front, which ends this
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _close_others({2, *(one.fileno() for one in keep)})
        work()
        status = 0
    finally:
        os._exit(status)


def _fork_for_queues(control: socket.socket, work: Sequence[Work]) -> None:
    """Fork a process for each message at `control`, until the front is gone.

    A message has a queue's number, and carries the socket over which the new process gets its tasks.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            of_queue = work[message[0]]
            _fork(lambda: _serve(connection, of_queue), keep=[connection])  # noqa: B023 - called at once


def _serve(connection: socket.socket, work: Work) -> None:
    """Run the tasks that arrive over `connection`, until the front is gone."""
    _lower_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_bytes = _data_bytes() + _MAX_NEW_BYTES
    _limit(resource.RLIMIT_DATA, most_bytes)
    with connection, connection.makefile("rb") as tasks, connection.makefile("wb") as answers:
        answers.write(SIZE.pack(os.getpid()))
        answers.flush()
        while size := tasks.read(SIZE.size):
            value = pickle.loads(tasks.read(*SIZE.unpack(size)))
            body = tasks.read(*SIZE.unpack(tasks.read(SIZE.size)))
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + _MAX_CPU_S)
            answer = _answer(work, value, body)
            parts = answer.parts if isinstance(answer, TaskResult) else ()
            head = TaskResult(answer.value) if isinstance(answer, TaskResult) else answer
            for part in itertools.chain(packed((len(parts), head)), *map(_framed, parts)):
                answers.write(part)
            answers.flush()
            del value, body, answer, parts, head


def _lower_priority() -> None:
    """Lower this process's priority, so that processes that compute tokens go first where cores are short.

    Linux may first divide the processor between sessions (autogroup). So the process gets a session of its
    own, with a nice value of its own.
    """
    os.setsid()
    niceness = os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _answer(work: Work, value: Any, body: bytes) -> TaskResult | Exception:
    try:
        return work(value, body)
    except MooncakeError as error:
        return error
    except MemoryError:
        return too_costly()
    except Exception:  # noqa: BLE001 - raised where the request is
        return RuntimeError(f"in a process beside this one:\n{traceback.format_exc()}")


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _data_bytes() -> int:
    """Return the bytes of memory of this process that `RLIMIT_DATA` limits."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) << 10


def _close_others(kept: set[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept | {0, 1}:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


def packed(value: Any) -> Sequence[bytes]:
    """Return the parts with which a value is sent: its length, and its pickle."""
    return _framed(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def _framed(part: bytes) -> Sequence[bytes]:
    return SIZE.pack(len(part)), part


def too_costly() -> RequestError:
    """Return the error for a task that exceeded its limits."""
    return RequestError(
        f"the request takes more than {_MAX_CPU_S} s of computing or {_MAX_NEW_BYTES >> 20} MiB of memory to"
        " read; make it simpler",
        code="request_too_costly",
    )
