"""The memory that blocks are sent from.

Owns: the segment and a descriptor of its file, which others may have. Does not know: what is in it.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """The memory a messenger sends from: the whole segment, and a read-only descriptor of it."""

    buffer: memoryview
    read_only_fd: int

    @classmethod
    def of(cls, fd: int, buffer: memoryview) -> "SourceSegment":
        return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
