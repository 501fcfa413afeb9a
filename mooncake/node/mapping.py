"""Shared mappings of files, aligned so that huge pages can back them.

Python's own `mmap` leaves the address to the kernel, which aligns it to 4 KiB. The mapping lasts as long as
any view of it.

Owns: addresses. Does not know: the contents of files.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

HUGE_PAGE_BYTES = 2 << 20
_ALLOCATED_BYTES = 16 * HUGE_PAGE_BYTES
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MappedFile:
    """A shared mapping of `size_bytes` of the file behind `fd`. Construction raises OSError."""

    def __init__(self, fd: int, size_bytes: int, *, read_only: bool = False) -> None:
        self.size_bytes = size_bytes
        self._read_only = read_only
        protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _map_aligned(fd, size_bytes, protection)
        self._bytes = (ctypes.c_char * size_bytes).from_address(self._address)
        weakref.finalize(self._bytes, _libc.munmap, self._address, size_bytes).atexit = False

    @property
    def view(self) -> memoryview:
        """The bytes of the mapping."""
        view = memoryview(self._bytes).cast("B")
        return view.toreadonly() if self._read_only else view

    def use_huge_pages(self, start: int, num_bytes: int) -> bool:
        """Move these bytes into huge pages, while other processes use them.

        Returns whether the kernel has done so.

        The range must be whole huge pages. With huge pages there are fewer faults and TLB misses, and a disk
        gets few long pieces instead of many pieces of 4 KiB. Blocking: it takes 0.4 to 5 s a GiB.
        """
        return self._advise(_MADV_COLLAPSE, start, num_bytes)

    def populate(self, start: int, num_bytes: int) -> bool:
        """Fault in these bytes (whole pages) now, instead of each 4 KiB at its first use.

        Returns whether the kernel has done so.
        """
        return self._advise(_MADV_POPULATE_WRITE, start, num_bytes)

    def lock(self) -> bool:
        """Lock the mapping in memory. Returns whether the limits of this process allow that. Blocking."""
        return bool(_libc.mlock(self._address, self.size_bytes) == 0)

    def _advise(self, advice: int, start: int, num_bytes: int) -> bool:
        return bool(_libc.madvise(self._address + start, num_bytes, advice) == 0)


def allocate(fd: int, size_bytes: int, is_given_up: Callable[[], bool] = lambda: False) -> None:
    """Allocate all memory of an empty file behind `fd`, in huge pages as far as the kernel allows.

    Moving small pages into huge ones later takes 20 times as long. The rest stays unallocated once
    `is_given_up` returns true. Raises OSError.
    """
    os.ftruncate(fd, size_bytes)
    mapping, are_huge = MappedFile(fd, size_bytes), True
    for start in range(0, size_bytes, _ALLOCATED_BYTES):
        if is_given_up():
            return
        num_bytes = min(_ALLOCATED_BYTES, size_bytes - start)
        huge_bytes = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if are_huge and huge_bytes:
            for page in range(start, start + huge_bytes, HUGE_PAGE_BYTES):
                os.posix_fallocate(fd, page, mmap.PAGESIZE)  # an empty range becomes no huge page
            are_huge = mapping.use_huge_pages(start, huge_bytes)
        os.posix_fallocate(fd, start, num_bytes)


def _map_aligned(fd: int, size_bytes: int, protection: int) -> int:
    """Return the address of a file's mapping at the boundary of a huge page.

    The mapping lies inside a range that is reserved first. Raises OSError.
    """
    page_bytes = mmap.PAGESIZE
    map_bytes = -(-size_bytes // page_bytes) * page_bytes
    reserved_bytes = map_bytes + HUGE_PAGE_BYTES
    start = _checked(
        _libc.mmap(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    )
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _checked(_libc.mmap(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        _libc.munmap(start, reserved_bytes)
        raise
    if address > start:
        _libc.munmap(start, address - start)
    _libc.munmap(address + map_bytes, start + reserved_bytes - address - map_bytes)
    return address


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address
