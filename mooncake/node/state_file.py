"""The file in which state outlives its process: SQLite, of the standard library.

One process at a time has the file, by a lock that ends with the process. A thread beside the event loop
carries out `write` calls in their order, and their changes are on disk when the calls return. `read` and
`clean`, which are for the start of the process, run on the caller's thread.

Owns: the file, its thread, which files are refused. Does not know: what is in the tables.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mooncake.errors import ConfigError, NotStoredError

_APPLICATION_ID = 0x6D6F6F6E
_FORMAT = 1
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

Row = Sequence[Any]
log = logging.getLogger(__name__)


class StateFile:
    """The open state file of a process."""

    def __init__(self, path: Path, schema: Iterable[str]) -> None:
        """Open the file, or create it with its directory and the tables of `schema`.

        Raises ConfigError if it is damaged, used by another process, or cannot be written to.
        """
        self._path = path
        try:
            self._database = _opened(path, schema)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(_why_unusable(path, error)) from None
        self._writer = ThreadPoolExecutor(1, "state-file")

    def read(self, query: str, values: Row = ()) -> list[Row]:
        """Return the rows of a query. Raises ConfigError if the file is damaged."""
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self.damaged(error) from None

    def damaged(self, error: sqlite3.Error) -> ConfigError:
        """Return the error for a file that cannot be used."""
        return ConfigError(_why_unusable(self._path, error))

    def clean(self, change: str, values: Row = ()) -> None:
        """Apply a change that may wait while the disk is full. Raises ConfigError if the file is damaged."""
        try:
            self._database.execute(change, values)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise self.damaged(error) from None
            log.error("%s: %s; nothing can be stored until there is room", self._path, error)
        except sqlite3.Error as error:
            raise self.damaged(error) from None

    async def write(self, *changes: tuple[str, Row]) -> None:
        """Apply changes, each with its values, all or none. Raises NotStoredError."""

        def carry_out() -> None:
            with self._database:
                self._database.execute("BEGIN")
                for change, values in changes:
                    self._database.execute(change, values)

        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, carry_out)
        except sqlite3.Error as error:
            log.error("%s cannot be written: %s", self._path, error)
            raise NotStoredError(str(error)) from None

    def close(self) -> None:
        """Finish pending writes, and close the file. Idempotent."""
        self._writer.shutdown()
        with contextlib.suppress(sqlite3.Error):  # all that was promised is in the file
            self._database.close()


def _opened(path: Path, schema: Iterable[str]) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # private: it has prompts
    database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        # Exclusive: the lock ends with the process, however that ends, and WAL needs no shared memory.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA secure_delete = ON")
        [[application_id]] = database.execute("PRAGMA application_id")
        [[used_format]] = database.execute("PRAGMA user_version")
        if (application_id, used_format) == (0, 0):
            database.execute("BEGIN IMMEDIATE")
            for table in schema:
                database.execute(table)  # fails if this is another program's database with such a table
            database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {_FORMAT}")
            database.execute("COMMIT")
        elif (application_id, used_format) != (_APPLICATION_ID, _FORMAT):
            raise sqlite3.DatabaseError("it is a database of another program or release")
        [[verdict]] = database.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict.splitlines()[-1])
    except BaseException:
        database.close()
        raise
    return database


def _why_unusable(path: Path, error: OSError | sqlite3.Error) -> str:
    where = f"conductor.state_file {path}"
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        return f"{where} cannot be written to: {error.strerror}{place}; name another one"
    code = getattr(error, "sqlite_errorcode", None)
    if code in _BUSY:
        return f"{where} is used by another mooncake-serve; name another one for this"
    if code is None or code in _DAMAGED or not isinstance(error, sqlite3.OperationalError):
        reason = f"is damaged, or no file of this release: {error}"
        return f"{where} {reason}; move it away to start without what is in it"
    return f"{where} cannot be used: {error}; name another one"
