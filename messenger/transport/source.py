"""Memory that blocks are sent from.

Owns: a descriptor of its file. Does not know: its content.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """The whole segment, a shared mapping of its file from the beginning.

    The descriptor of that file, for others too, stays open for as long as anybody sends.
    """

    buffer: memoryview
    read_only_fd: int

    @classmethod
    def of(cls, fd: int, buffer: memoryview) -> "SourceSegment":
        return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
