"""The output of `mooncake-kv`: rows for people, or for programs.

Owns: the form of rows. Does not know: their contents.
"""

import json
import sys
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

_FOLDED = ("instance", "state", "file", "damaged")
"""The columns of tables whose text may take several lines."""


class Rows:
    """The output of a command: a table on a terminal, tab-separated lines elsewhere, or JSON objects.

    In JSON, one line is one object. A table fits into 80 columns: names are folded, keys and numbers stay
    whole. With `last_below` the values of the last column stand below the table, each once.
    """

    def __init__(self, columns: Sequence[str], *, as_json: bool, last_below: bool = False) -> None:
        self._as_json = as_json
        self._below: dict[str, None] = {}
        self._table: rich.table.Table | None = None
        if sys.stdout.isatty() and not as_json:
            self._table = rich.table.Table(
                box=rich.box.SIMPLE_HEAVY, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
            )
            for column in columns[:-1] if last_below else columns:
                self._table.add_column(column, overflow="fold", no_wrap=column not in _FOLDED)
        elif not as_json:
            print(*columns, sep="\t")

    def add(self, cells: Sequence[object], facts: dict[str, object]) -> None:
        """Add a row: `cells` for people, `facts` for programs."""
        if self._as_json:
            print(json.dumps(facts))
        elif self._table is not None:
            texts = list(map(str, cells))
            num_columns = len(self._table.columns)
            self._table.add_row(*texts[:num_columns])
            self._below |= dict.fromkeys(f"{texts[0]} is {text}" for text in texts[num_columns:])
        else:
            print(*cells, sep="\t")

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None and self._table.row_count:
            console = rich.console.Console(highlight=False)
            console.print(self._table)
            for line in self._below:
                console.print(line, markup=False, soft_wrap=True)
