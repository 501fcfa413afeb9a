"""A limit on log lines about events that peers can cause in any number.

Owns: the count at which the next line is due. Does not know: the line.
"""


class Doubling:
    """A schedule of log lines: one at the count `first`, and another one whenever the count has doubled."""

    def __init__(self, first: int) -> None:
        self._next = first

    def is_due(self, count: int) -> bool:
        """Return whether to log at this `count`. If so, the next line is due at twice the count."""
        is_due = count >= self._next
        if is_due:
            self._next = 2 * count
        return is_due
