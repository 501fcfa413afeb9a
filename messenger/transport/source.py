"""The memory from which blocks are sent.

Owns: a descriptor of the memory's file. Does not know: its content.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """The memory from which a messenger sends blocks: a shared mapping of its whole segment file.

    The descriptor of the file, which is passed to peers on this host, stays open for as long as anything is
    sent.
    """

    buffer: memoryview
    read_only_fd: int

    @classmethod
    def of(cls, fd: int, buffer: memoryview) -> "SourceSegment":
        return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
