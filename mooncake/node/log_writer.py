"""The log of a process: lines on stderr, written by a thread of its own.

A paused supervisor, or a pipe that nobody reads, must not block the process: lines that do not fit into the
queue are dropped.

Owns: the way from a logger to stderr. Does not know: loggers.
"""

import contextlib
import logging
import queue
from logging.handlers import QueueHandler
from threading import Thread
from typing import TextIO

QUEUE_LEN = 10_000
LAST_LINES_S = 1.0
FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class LogWriter(QueueHandler):
    """The handler of the root logger.

    It queues a log record within microseconds, with the values of that moment.
    """

    def __init__(self, file: TextIO) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_LEN)
        super().__init__(self._lines)
        self._file, self._format = file, logging.Formatter(FORMAT)
        self._thread = Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record without waiting. It is dropped if the queue is full."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(record)

    def finish(self) -> None:
        """Write all queued lines, unless the reader is gone. Nothing may be logged afterwards."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(LAST_LINES_S)

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                self._file.write(self._format.format(record) + "\n")
                self._file.flush()
