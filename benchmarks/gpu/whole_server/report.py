"""What a stage prints: a line for each check, with its figure.

Owns: the lines, and whether all were good. Does not know: the checks.
"""

import time
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Found(NamedTuple):
    """What a check has found."""

    is_good: bool
    figure: str


class Report:
    """The lines of a stage. An error of a check is a line too, and the checks behind it go on."""

    def __init__(self) -> None:
        self.is_good = True
        self._began_s = time.monotonic()

    def check(self, name: str, find: Callable[[], Found]) -> bool:
        """Print what `find` returns or raises; whether it was good."""
        try:
            is_good, figure = find()
        except Exception as error:  # noqa: BLE001 - the other checks go on
            [place] = traceback.extract_tb(error.__traceback__)[-1:]
            is_good, figure = (
                False,
                f"{type(error).__name__}: {str(error)[:600]} ({place.name}:{place.lineno})",
            )
        self.is_good &= is_good
        at_s = time.monotonic() - self._began_s
        print(f"{'ok  ' if is_good else 'WRONG'} [{at_s:5.1f} s] {name}: {figure}", flush=True)
        return is_good
