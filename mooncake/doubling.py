"""When to log what may happen as often as others like.

Owns: the count at which the next line is due. Does not know: the line.
"""


class Doubling:
    """When to log a count that grows: at `first`, and each time that it has doubled since."""

    def __init__(self, first: int) -> None:
        self._next = first

    def has_come(self, count: int) -> bool:
        """Whether to log it now."""
        is_due = count >= self._next
        if is_due:
            self._next = 2 * count
        return is_due
