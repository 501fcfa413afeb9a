"""Versions of a protocol, and how processes of two releases agree on one.

A release speaks its own version of each protocol and that of the release before, so a cluster is upgraded
node by node, in any order, and back. The side that opens a conversation names the versions that it speaks;
both sides then speak the newest one that both know. What keeps two versions compatible:

- A reader ignores fields that it does not know, and has a default for fields that an older peer does not
  send.
- What the version before does not have is sent only to a peer that speaks the new version: a message, a value
  of an enumeration, a number beyond the old bound, and a field that must not be ignored because it changes an
  answer or what is written to a page.
- KV events (a broadcast) and tokens have the form of the oldest version that is spoken, as their readers name
  no version.
- A release reads the forms of the versions that it speaks, and of no others.

`tests/compatibility` compares the messages with those of the release before, and says what to do about a
difference.

Owns: the choice. Does not know: messages.
"""

from typing import NamedTuple


class Versions(NamedTuple):
    """The inclusive range of versions of a protocol that a process speaks."""

    oldest: int
    newest: int

    @classmethod
    def named(cls, oldest: int, newest: int | None) -> "Versions":
        """Return the versions that a peer has named.

        `newest` is None for a peer of a release that spoke one version.
        """
        return cls(oldest, oldest if newest is None else newest)

    def common(self, theirs: "Versions") -> int | None:
        """Return the newest version that both sides speak; None if there is none."""
        newest = min(self.newest, theirs.newest)
        return newest if newest >= max(self.oldest, theirs.oldest) else None

    def advice(self, us: str, theirs: "Versions", them: str) -> str:
        """Return the advice for two sides without a common version, named `us` and `them`."""
        is_ours_older = self.newest < theirs.oldest
        older, needed = (us, theirs.oldest) if is_ours_older else (them, self.oldest)
        return f"upgrade {older} to a release that speaks {needed} first: one version is upgraded at a time"

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return str(self.oldest)
        return f"{self.oldest} {'and' if self.newest == self.oldest + 1 else 'to'} {self.newest}"
