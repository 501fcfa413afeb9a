"""The findings of a measurement: tables whose rows are printed at once, and kept.

Owns: Markdown, the file for programs. Does not know: the measurements.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Found(NamedTuple):
    """The finding of one check."""

    is_good: bool
    figure: str


class Report:
    """Tables of findings. `is_good`: whether every result is right and within its limit (its *bar*)."""

    def __init__(self, file: Path | None = None) -> None:
        """Begin a report. `file` is written anew as JSON after each row."""
        self.is_good = True
        self._began_s = time.monotonic()
        self._file = file
        self._tables: list[dict[str, Any]] = []
        self._facts: dict[str, str] = {}

    def table(self, title: str, *columns: str) -> None:
        """Begin a table with these columns."""
        self._tables.append({"title": title, "columns": columns, "rows": [], "values": []})
        self._print("\n".join(_head(title, columns)))

    def row(self, *cells: str, **values: object) -> None:
        """Add a row to the last table. `values` are the same facts for programs, as numbers and words."""
        self._tables[-1]["rows"].append(cells)
        self._tables[-1]["values"].append(values)
        self._print(_line(cells))

    def checks(self, title: str) -> None:
        """Begin a table of checks."""
        self.table(title, "", "found", "after", "")

    def check(self, name: str, find: Callable[[], Found]) -> bool:
        """Add a row with the finding that `find` returns or raises. Returns whether the finding is good."""
        try:
            is_good, figure = find()
        except Exception as error:  # noqa: BLE001 - the other checks go on
            is_good, figure = False, _told(error)
        self.is_good &= is_good
        after_s = time.monotonic() - self._began_s
        cells = name, figure, f"{after_s:.1f} s", "ok" if is_good else "**WRONG**"
        self.row(*cells, name=name, found=figure, after_s=round(after_s, 1), is_good=is_good)
        return is_good

    def say(self, **facts: str) -> None:
        """Add facts about the whole report, such as `error`."""
        self._facts |= facts
        self._print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))

    def _print(self, text: str) -> None:
        print(text, flush=True)
        if self._file:
            write_json(self._file, {"tables": self._tables, **self._facts})


def _told(error: Exception) -> str:
    """Return an error's text, and the place where it was raised, even in another process."""
    text = "".join(traceback.format_exception(error.__cause__ or error))
    places = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    said = " ".join(str(error)[:600].split())
    return " ".join([f"{type(error).__name__}: {said}", *places[-1:]])


def write_json(file: Path, value: object) -> None:
    """Write a file as a whole: a reader finds the new or the old version, even if the writer is killed."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(json.dumps(value))
    written.replace(file)


def tables_of(record: Mapping[str, Any]) -> str:
    """Return the tables of a report's file in Markdown."""
    lines: list[str] = []
    for table in record.get("tables", ()):
        lines += [*_head(table["title"], table["columns"]), *map(_line, table["rows"])]
    return "\n".join(lines)


def _head(title: str, columns: tuple[str, ...]) -> list[str]:
    return ["", title, "", _line(columns), "|" + "---|" * len(columns)]


def _line(cells: tuple[str, ...]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return "|" + "|".join(f" {cell} " if cell else " " for cell in escaped) + "|"
