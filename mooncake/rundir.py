"""The run directory: where a node's sockets live while it runs.

It is private to the user and locked by the supervisor. A directory whose lock is free belongs to a
supervisor that was killed, and is removed by the next one.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "mooncake-"
LOCK = "lock"


class RunDirectory:
    """Context manager: creates the directory, removes it and everything in it at the end."""

    def __init__(self) -> None:
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        _remove_abandoned(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def socket(self, name: str) -> str:
        """Path of a socket in this directory."""
        return str(self.path / f"{name}.sock")

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # its supervisor is alive
        finally:
            os.close(lock)
