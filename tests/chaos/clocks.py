"""Wrong clocks: single processes read a time of day that differs from the machine's.

Owns: the library that a process needs for that, the table of differences. Does not know: whose clock is
wrong, when.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_SOURCE = Path(__file__).with_suffix(".c")
_BYTES = 8


class Clocks:
    """The differences from the right time, for each process that the fork server forks."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into `folder`, and start the fork server with it.

        To be called before any fork.
        """
        self._library, self._table = folder / "clocks.so", folder / "clocks"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE], check=True)
        num_pids = int(Path("/proc/sys/kernel/pid_max").read_text())
        with self._table.open("wb") as table:
            table.truncate(_BYTES * num_pids)
        with mock.patch.dict(os.environ, LD_PRELOAD=str(self._library), CHAOS_CLOCKS=str(self._table)):
            forkserver.ensure_running()

    @contextlib.contextmanager
    def wrong(self, pid: int, difference_s: int) -> Iterator[None]:
        """Make a context in which the clock of process `pid` is wrong by `difference_s` seconds."""
        self._write(pid, difference_s)
        try:
            yield
        finally:
            self._write(pid, 0)

    def _write(self, pid: int, difference_s: int) -> None:
        with self._table.open("r+b", buffering=0) as table:
            os.pwrite(table.fileno(), difference_s.to_bytes(_BYTES, "little", signed=True), _BYTES * pid)
