"""Requests that have not arrived whole.

Owns: how much they hold together, who makes room. Does not know: HTTP.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Sender = TypeVar("Sender", bound=Hashable)


class Intake(Generic[Sender]):
    """At most `limit_bytes` of them; whoever has been sending for longest makes room for others."""

    def __init__(self, limit_bytes: int, put_out: Callable[[Sender], None]) -> None:
        """`put_out` is called with a sender that has made room, and holds nothing any more."""
        self._limit_bytes, self._put_out = limit_bytes, put_out
        self._num_bytes: dict[Sender, int] = {}
        """oldest first"""
        self._total_bytes = 0

    def came(self, sender: Sender, num_bytes: int) -> None:
        """More of the sender's request."""
        self._num_bytes[sender] = self._num_bytes.get(sender, 0) + num_bytes
        self._total_bytes += num_bytes
        while self._total_bytes > self._limit_bytes:
            oldest = next(iter(self._num_bytes))
            self.left(oldest)
            self._put_out(oldest)

    def left(self, sender: Sender) -> None:
        """The sender's request is whole, or will not be."""
        self._total_bytes -= self._num_bytes.pop(sender, 0)
