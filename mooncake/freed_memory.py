"""Memory that a process has freed, and that the C library keeps for it.

Owns: giving it back to the system. Does not know: who has freed it, when that is worth the search.
"""

import contextlib
import ctypes


def give_back() -> None:
    """Takes some milliseconds, in which Python's other threads run."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
