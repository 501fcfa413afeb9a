"""A picker in a process of its own."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parent.parent.parent.parent
PROGRAM = "from conductor.picker.cli import main; main()"


class Running:
    """A picker that is listening."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.port = int(process.stdout.readline().removeprefix("listening on port "))
        self._process, self._is_told = process, False

    def tell_to_end(self) -> None:
        """Send the picker a signal to end. Further calls send none.

        A second signal could come when Python has removed its handlers.
        """
        if not self._is_told:
            self._process.send_signal(signal.SIGTERM)
        self._is_told = True


@contextlib.contextmanager
def picker(*arguments: str) -> Iterator[Running]:
    """Make a context with a picker, which must end with status 0."""
    command = [sys.executable, "-c", PROGRAM, "--listen", "127.0.0.1:0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            running = Running(process)
            try:
                yield running
            finally:
                running.tell_to_end()
                status = process.wait(DEADLINE_S)
        finally:
            process.kill()
    assert status == 0
