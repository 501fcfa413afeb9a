"""The progress of a long command: a bar on a terminal, elsewhere a line every few seconds; both on stderr.

Owns: the display. Does not know: the work.
"""

import contextlib
import threading
import time

import rich.console
import rich.progress

PERIOD_S = 3.0
"""Seconds between two lines where there is no terminal."""
_SHORTEST_WAIT_S = 0.05


class StepDisplay:
    """A context manager that shows the current step of a command. `show` may be called at any rate.

    A thread writes lines, so they also appear while one step takes long.
    """

    def __init__(self, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._began_s = self._told_s = time.monotonic()
        self._step = ""
        self._telling = threading.Lock()
        self._is_over = threading.Event()
        self._bar: rich.progress.Progress | None = None
        self._teller: threading.Thread | None = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[count]}"),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, count="")
        else:
            self._teller = threading.Thread(target=self._tell_now_and_then, name="steps", daemon=True)

    def show(self, step: str, done: int = 0, total: int | None = None, count: str = "") -> None:
        """Show the step, and that `done` of `total` units are complete, or the text `count` instead."""
        count = count or (f"{done} of {total}" if total else str(done or ""))
        if self._bar is not None:
            self._bar.update(self._task, description=step, completed=done, total=total or None, count=count)
            return
        self._step = f"{step}: {count}" if count else step
        self._tell_if_due()

    def __enter__(self) -> "StepDisplay":
        if self._bar is not None:
            self._bar.start()
        if self._teller is not None:
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._teller is not None:
            self._teller.join()

    def _tell_now_and_then(self) -> None:
        while not self._is_over.wait(max(PERIOD_S, _SHORTEST_WAIT_S)):
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        with self._telling:
            now_s = time.monotonic()
            if self._step and now_s - self._told_s >= PERIOD_S:
                self._told_s = now_s
                line = f"{self._step} ({now_s - self._began_s:.0f} s)"
                with contextlib.suppress(OSError, ValueError):  # stderr is closed
                    self._console.print(line, markup=False)
