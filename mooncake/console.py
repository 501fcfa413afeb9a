"""What a person sees of the supervisor: progress bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterable
from types import TracebackType

import rich.console
import rich.progress

from mooncake.process import Progress


class Console:
    """Shows the state of the named children on stderr; the final hint goes to stdout."""

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

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, name: str, text: str) -> None:
        """A line that a child printed."""
        self._console.print(f"[{name}] {text}", markup=False)

    def progress(self, name: str, progress: Progress) -> None:
        """How far a child is with starting. Without a terminal each phase is said once."""
        self._progress.update(
            self._tasks[name], total=progress.total or None, completed=progress.done, state=progress.phase
        )
        if not self._console.is_terminal and self._phases.get(name) != progress.phase:
            self.line(name, progress.phase)
        self._phases[name] = progress.phase

    def ready(self, name: str, detail: str) -> None:
        """A child serves."""
        self._progress.update(self._tasks[name], total=1, completed=1, state="ready")
        self.line(name, f"ready {detail}".rstrip())

    def died(self, name: str, code: int | None, last_lines: Iterable[str], backoff_s: float) -> None:
        """A child ended by itself; it is started again after `backoff_s`."""
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self.line(name, f"died ({how}); starting it again in {backoff_s:g} s. Its last lines:")
        for text in last_lines:
            self.line(name, f"  | {text}")
        self._progress.update(self._tasks[name], total=None, state="restarting")

    def announce(self, seconds: float, hint: str) -> None:
        """Everything serves."""
        self._progress.stop()
        self._console.print(f"ready in {seconds:.1f} s. Ctrl-C ends it.", markup=False)
        if hint:
            print(f"Try it:\n\n  {hint}\n")
            sys.stdout.flush()
