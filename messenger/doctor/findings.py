"""Findings, and the checks that make them without raising or hanging.

Owns: levels, findings, the deadline of a check. Does not know: what is checked, how findings are shown.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from mooncake.errors import MooncakeError

QUICK_S = 5.0
"""Time limit in seconds of a check that reads files and runs one or two commands."""


class Level(IntEnum):
    """The severity of a finding; the worst severity is the largest number."""

    OK = 0
    WARN = 1
    """The checked thing works, but more slowly or less well than it could."""
    FAIL = 2
    """A function that is configured, or was asked for, cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    `advice` says how to mend the fault; it is empty if there is nothing to mend.
    """

    level: Level
    title: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `look` may block for `deadline_s` seconds."""

    title: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float = QUICK_S

    def run(self) -> list[Finding]:
        """Return the findings made before the deadline. If the check raises, its error is a finding too."""
        found: list[Finding] = []
        thread = threading.Thread(target=self._collect, args=(found,), name=self.title, daemon=True)
        thread.start()
        thread.join(self.deadline_s)
        findings = found.copy()
        if thread.is_alive():
            text = f"no result within {self.deadline_s:g} s, given up"
            findings.append(
                Finding(Level.WARN, self.title, text, "look whether the machine hangs elsewhere too")
            )
        return findings

    def _collect(self, found: list[Finding]) -> None:
        try:
            found.extend(self.look())
        except MooncakeError as error:
            found.append(Finding(Level.FAIL, self.title, str(error)))
        except Exception as error:  # noqa: BLE001  (the other checks still have something to say)
            text = f"this check itself failed: {type(error).__name__}: {error}"
            found.append(Finding(Level.WARN, self.title, text, "please report it"))


def as_size(num_bytes: int) -> str:
    """Return bytes as text: `8 MiB`, `1.5 GiB`."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << exponent:
            return f"{num_bytes / (1 << exponent):.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes} bytes"
