"""The incarnations of a supervised process: how each ends, and what the next one learns of this end.

Owns: which ends are a process's own fault. Does not know: the work of processes.
"""

import signal
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_FAULTS = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)
"""The signals that a process gets for its own faults."""


class ProcessEnd(StrEnum):
    """The cause of a process's end."""

    FAILED = "failed"
    """The process failed by itself: an error, a fault, a lack of memory, or a hang for which it was ended."""
    KILLED = "killed"
    """Another process ended this one, by a signal to end or to kill."""


class Life(NamedTuple):
    """One incarnation of a process, about to begin.

    `previous_end` is the end of the previous incarnation, None for the first one.
    """

    incarnation: int
    previous_end: ProcessEnd | None = None


def end_of(returncode: int, *, hung: bool, num_oom_kills: int) -> ProcessEnd:
    """Return the cause of the end of a process with `returncode` (negative: the signal that ended it).

    `hung`: the process was killed because it gave no sign of life. `num_oom_kills`: how many processes the
    kernel has killed for lack of memory while this process lived. If there are any, a process that SIGKILL
    has ended is taken to be one of them.
    """
    if returncode >= 0:
        failed = returncode != 0
    elif returncode == -signal.SIGKILL:
        failed = hung or num_oom_kills > 0
    else:
        failed = -returncode in _FAULTS
    return ProcessEnd.FAILED if failed else ProcessEnd.KILLED


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("oom_kill", 0))
