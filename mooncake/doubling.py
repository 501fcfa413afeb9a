"""A limit on log lines about events that peers can cause as often as they like.

Owns: the count at which the next line is due. Does not know: the line.
"""


class Doubling:
    """A growing count that is logged at `first`, and each time that it has doubled since."""

    def __init__(self, first: int) -> None:
        self._next = first

    def has_come(self, count: int) -> bool:
        """Return whether to log `count` now."""
        is_due = count >= self._next
        if is_due:
            self._next = 2 * count
        return is_due
