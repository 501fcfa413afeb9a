"""The choice of a connection to close among many: SIEVE (Zhang et al., NSDI'24).

A hand goes over the connections from the oldest to the newest. The hand spares each connection that was used
since the hand last passed, and takes the first connection that was not used.

Owns: the order. Does not know: the connections, and which of them may be given up (the caller says).
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value
    was_used: bool = False


class Sieve(Generic[Key, Value]):
    """A mapping in order of age, with SIEVE's marks of use."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry[Value]] = {}
        self._hand: Key | None = None
        """The key that is examined next; None, or a key that is gone, stands for the oldest key."""

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> Iterator[Value]:
        return (entry.value for entry in self._entries.values())

    def get(self, key: Key) -> Value | None:
        """Return the value of `key`, marked as used; None without an entry."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.was_used = True
        return entry.value

    def put(self, key: Key, value: Value) -> None:
        """Add the newest entry, in place of an entry with the same key."""
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value)

    def discard(self, key: Key, value: Value) -> None:
        """Remove `key` if its value still is `value`."""
        entry = self._entries.get(key)
        if entry is not None and entry.value is value:
            del self._entries[key]

    def evict(self, may_go: Callable[[Value], bool]) -> Value | None:
        """Remove an entry whose value `may_go` accepts, and return the value; None without such an entry."""
        keys = list(self._entries)
        start = keys.index(self._hand) if self._hand in self._entries else 0
        for step in range(2 * len(keys)):  # the first round may only take marks away
            position = (start + step) % len(keys)
            entry = self._entries[keys[position]]
            if not may_go(entry.value):
                continue
            if not entry.was_used:
                self._hand = keys[position + 1] if position + 1 < len(keys) else None
                del self._entries[keys[position]]
                return entry.value
            entry.was_used = False
        return None
