"""The supervisor's output for people: progress bars on a terminal, plain lines elsewhere.

Everything is written by a thread of its own: a paused terminal, or a pipe that nobody reads, must not block
the cluster. Output that does not fit into the thread's queue is dropped.
"""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable

import rich.console
import rich.progress

from mooncake.node.process import Progress

QUEUE_LEN = 10_000
LAST_WORDS_S = 1.0


class Console:
    """The display of the children's states on stderr; the final hint goes to stdout.

    A context manager; at its end `is_stuck` says whether some output could not be written.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<22}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[state]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks = {name: self._progress.add_task(name, total=None, state="starting") for name in names}
        self._phases: dict[str, str] = {}
        self._writes: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LEN)
        self._writer = threading.Thread(target=self._write, name="console", daemon=True)

    @property
    def is_stuck(self) -> bool:
        """Whether output still waits for a reader."""
        return self._writer.is_alive()

    def _write(self) -> None:
        while (write := self._writes.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stdout or stderr is closed; the other may not be
                write()

    def _put(self, write: Callable[[], None] | None) -> None:
        with contextlib.suppress(queue.Full):
            self._writes.put_nowait(write)

    def __enter__(self) -> "Console":
        self._writer.start()
        self._put(self._progress.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._put(self._progress.stop)
        self._put(None)
        self._writer.join(LAST_WORDS_S)

    def line(self, name: str, text: str) -> None:
        """Show a line that a child printed."""
        self._put(lambda: self._console.print(f"[{name}] {text}", markup=False))

    def error(self, message: str) -> None:
        """Show the error with which the node's processes end."""
        self._put(lambda: self._console.print(f"error: {message}", markup=False))

    def progress(self, name: str, progress: Progress) -> None:
        """Show a child's progress in starting. Without a terminal each phase is shown once."""
        self._show(name, total=progress.total or None, completed=progress.done, state=progress.phase)
        if not self._console.is_terminal and self._phases.get(name) != progress.phase:
            self.line(name, progress.phase)
        self._phases[name] = progress.phase

    def ready(self, name: str, detail: str) -> None:
        """Show that a child serves."""
        self._show(name, total=1, completed=1, state="ready")
        self.line(name, f"ready {detail}".rstrip())

    def draining(self, name: str, work: str, drain_s: float | None) -> None:
        """Show that a child finishes its work before it ends.

        `drain_s` is the most seconds for which the end of the node waits; None if the node does not end.
        """
        limit = "" if drain_s is None else f", at most {drain_s:g} s; press Ctrl-C again to end now"
        self.line(name, f"waiting for {work}{limit}")

    def died(self, name: str, code: int | None, last_lines: Iterable[str], backoff_s: float) -> None:
        """Show that a child has died, and that it is restarted after `backoff_s` seconds."""
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self.line(name, f"died ({how}); starting it again in {backoff_s:g} s. Its last lines:")
        for text in last_lines:
            self.line(name, f"  | {text}")
        self._show(name, total=None, completed=0, state="restarting")

    def announce(self, seconds: float, hint: str) -> None:
        """Show that all children serve, after `seconds` seconds, and show the hint."""
        self._put(self._progress.stop)
        self._put(lambda: self._console.print(f"ready in {seconds:.1f} s. Ctrl-C ends it.", markup=False))
        if hint:
            self._put(lambda: print(f"Try it:\n\n  {hint}\n", file=sys.stdout, flush=True))

    def _show(self, name: str, total: int | None, completed: int, state: str) -> None:
        task = self._tasks[name]
        self._put(lambda: self._progress.update(task, total=total, completed=completed, state=state))
