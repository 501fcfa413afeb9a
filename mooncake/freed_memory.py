"""Memory that a process has freed, and that the C library keeps for it.

Owns: the release to the system. Does not know: who has freed the memory, when a release is worth its time.
"""

import contextlib
import ctypes


def release_freed_memory() -> None:
    """Return freed memory to the operating system.

    Takes some milliseconds, in which other Python threads run.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
