"""Files that may change while the server runs.

Owns: the search for changes. Does not know: contents of files.
"""

from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Files whose changes are noticed by size, inode and modification time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._versions = self._read()

    def have_changed(self) -> bool:
        """Return whether any of the files has changed since the last call, or since the construction."""
        before, self._versions = self._versions, self._read()
        return self._versions != before

    def _read(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
