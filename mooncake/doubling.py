"""A limit on log lines about events that may be many, as peers cause them.

Owns: the count at which the next line is due. Does not know: the line.
"""


class Doubling:
    """The counts of events at which there is a log line: `first`, and then twice the count of each line."""

    def __init__(self, first: int) -> None:
        self._next = first

    def is_due(self, count: int) -> bool:
        """Return whether to log `count` now. If so, the next line is due at twice that count."""
        is_due = count >= self._next
        if is_due:
            self._next = 2 * count
        return is_due
