"""The lives of a supervised process, one after the other: how one has ended, and what the next is told of it.

Owns: which ends are a process's own fault. Does not know: what processes do.
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
"""signals that a process gets for what it does itself"""


class ProcessEnd(StrEnum):
    """Whose doing the end of a process was."""

    FAILED = "failed"
    """its own: an error, a fault, a lack of memory, or it hung and was ended for that"""
    KILLED = "killed"
    """somebody else's: it was told to end, or killed"""


class Life(NamedTuple):
    """One life of a process, which is about to begin.

    `incarnation` grows from life to life. `previous_end`: of the life before, None for the first one.
    """

    incarnation: int
    previous_end: ProcessEnd | None = None


def end_of(returncode: int, *, hung: bool, num_oom_kills: int) -> ProcessEnd:
    """Whose doing it was that a process has ended with `returncode` (negative: by that signal).

    `hung`: it was killed because it gave no sign of life. `num_oom_kills`: how many processes the kernel has
    killed for lack of memory in its lifetime; one that got SIGKILL was among them, as far as can be told.
    """
    if returncode >= 0:
        failed = returncode != 0
    elif returncode == -signal.SIGKILL:
        failed = hung or num_oom_kills > 0
    else:
        failed = -returncode in _FAULTS
    return ProcessEnd.FAILED if failed else ProcessEnd.KILLED


def num_oom_kills() -> int:
    """How many processes of this machine the kernel has killed for lack of memory; 0 if it does not say."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("oom_kill", 0))
