"""The run directory, which holds a node's sockets and the description of the run.

The directory is private to the user and locked by the supervisor. A directory whose lock is free belongs to a
supervisor that was killed, and the next supervisor removes it. A supervisor that is killed in its first
instant leaves a directory `.mooncake-serve-starting-*` with at most an empty `lock`, which no supervisor
removes.

Owns: the directory, and how other programs of this user find it. Does not know: the use of the sockets.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mooncake.errors import ConfigError

PREFIX = "mooncake-serve-"
STARTING_PREFIX = ".mooncake-serve-starting-"
LOCK = "lock"
FACTS = "run.json"
LONGEST_SOCKET_PATH_BYTES = 107  # of `sockaddr_un`, its final zero not counted


class Run(msgspec.Struct, frozen=True):
    """A running `mooncake-serve`, as its run directory describes it."""

    role: str
    cluster: str
    """The address of the cluster (`Config.cluster_address`).

    It is equal in all runs of one cluster, and in no run of another cluster.
    """
    http_port: int | None = None
    """The port of the API, if the run has one and the configuration names it; else None."""


class RunDirectory:
    """A context manager that creates the run directory, and removes it with its contents at the end.

    Construction raises ConfigError.
    """

    def __init__(self) -> None:
        base = _base()
        _remove_abandoned(base)
        # The directory gets the name by which others find it only once it is locked.
        try:
            starting = Path(tempfile.mkdtemp(prefix=STARTING_PREFIX, dir=base))
        except OSError as error:
            raise ConfigError(
                f"cannot create a run directory in {base}: {error.strerror}; set XDG_RUNTIME_DIR to another"
            ) from None
        self._lock = os.open(starting / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = base / (PREFIX + starting.name.removeprefix(STARTING_PREFIX))
        starting.rename(self.path)

    @property
    def unique_name(self) -> str:
        """A name that is unique among the runs on this machine."""
        return self.path.name.removeprefix(PREFIX)

    def socket(self, name: str) -> str:
        """Return the path of a socket in this directory.

        Raises ConfigError if the path is too long for a Unix socket.
        """
        path = str(self.path / f"{name}.sock")
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} is longer than {LONGEST_SOCKET_PATH_BYTES} bytes; "
                "set XDG_RUNTIME_DIR to a shorter directory"
            )
        return path

    def describe(self, run: Run) -> None:
        """Write the description of the run, for `running`."""
        unfinished = self.path / f"{FACTS}.unfinished"
        unfinished.write_bytes(msgspec.json.encode(run))
        unfinished.rename(self.path / FACTS)

    def remove(self) -> None:
        """Remove the directory and all its contents, as the context manager does at its end."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
        os.close(self._lock)


def running() -> Iterator[tuple[Path, Run]]:
    """Yield this user's run directories whose supervisors live and have described their runs."""
    for path in sorted(_base().glob(f"{PREFIX}*/{FACTS}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # just ended, or of another release
            if path.stat().st_uid == os.getuid() and _is_locked(path.parent / LOCK):
                yield path.parent, msgspec.json.decode(path.read_bytes(), type=Run)


def _base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def _is_locked(path: Path) -> bool:
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # its supervisor is alive
        finally:
            os.close(lock)
