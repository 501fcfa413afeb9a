"""The processes of a process group, as Linux lists them.

Owns: reading /proc. Does not know: what the processes do.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_STOPPED, _ENDED = "Tt", "ZX"


class Process(NamedTuple):
    """A process that has not ended, as /proc describes it."""

    pid: int
    parent: int
    group: int
    is_stopped: bool
    """Whether a signal or a debugger has paused the process."""

    @property
    def is_tracker(self) -> bool:
        """Whether the process is a resource tracker of Python's `multiprocessing`."""
        with contextlib.suppress(OSError):
            return b"multiprocessing.resource_tracker" in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return False


def processes() -> Iterator[Process]:
    """Yield all processes of the machine."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if state not in _ENDED:
                yield Process(int(path.name), int(parent), int(group), state in _STOPPED)


def members(group: int) -> list[Process]:
    """Return the processes of a process group."""
    return [process for process in processes() if process.group == group]


def groups_below(parent: int) -> set[int]:
    """Return the process groups to which the children of a process belong."""
    return {process.group for process in processes() if process.parent == parent}
