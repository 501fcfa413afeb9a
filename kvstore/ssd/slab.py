"""A slab: one preallocated file that holds blocks in slots, a part of the pool's SSD tier.

A slab has the format of a segment (`kvstore.pool.segment`) under its own magic. Header and slot table are
mapped, so writes to them outlive a process that is killed at any moment. The slots are not mapped: blocks go
to and from the disk by O_DIRECT, past the page cache, where they would only evict other data.

Beside `<name>.slab` lies `<name>.slab.lock`, which is never removed. The process that holds its flock owns
the slab. A slab is created as `<name>.slab.new` and gets its name once it is complete on the disk.

The disk may lose power between a record and its data. So `SsdTier.load` always verifies the record
(`PageTable.is_intact`) and the checksums of a block that it reads, although this is not needed after kill -9.

An existing slab keeps its size: another size would mean another table, and the loss of its blocks. Slots are
not written when a slab is created. Therefore the first write to a slot is slower by about half: the file
system records that the slot is written. Writing zeros at the creation would take as much time, and would wear
the disk.

The speed of O_DIRECT also depends on memory: a block that lies in fewer physically contiguous pieces takes
fewer requests to the disk.

Owns: the file, its lock, its IO. Does not know: which block is in which slot, when to read and write.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.pool.pages import PageTable
from kvstore.pool.segment import ALIGNMENT, SegmentHeader, read_header, write_header
from mooncake.errors import ConfigError, MismatchError
from mooncake.messages.blocks import BlockKey, KVLayout

MAGIC = b"MCKVSLB\0"

_MODE = 0o600  # a block reveals its prompt
_PID_DIGITS = 10
_MISPLACED = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)

_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

log = logging.getLogger(__name__)


class Record(NamedTuple):
    """The record of a block in a slab's table. `checksums`: little-endian xxh3-64 of all layers."""

    key: BlockKey
    checksums: bytes
    last_use: int
    position: int
    num_uses: int


class Slab:
    """An open, locked slab.

    `slot_bytes` is the size of a slot: the size of a block, rounded up to a multiple of 4096. `table` has a
    page for each slot. The `PageAllocator` of a `Disk` adopts a copy of the table.
    """

    def __init__(self, path: Path, header: SegmentHeader, table: PageTable, fd: int, lock_fd: int) -> None:
        """Make a slab that owns both descriptors."""
        self.path = path
        self.table = table
        self.num_slots = header.num_pages
        self.slot_bytes = header.page_stride
        self.header = header
        self._records = threading.Lock()
        """Lock of the records, as one thread may clear a record while another writes one."""
        self._fd = fd
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, directory: Path, name: str, size_bytes: int, fingerprint: str, layout: KVLayout) -> "Slab":
        """Return the slab `<directory>/<name>.slab`, created with at most `size_bytes` if there is none.

        Blocking. Raises

        - ConfigError: the directory cannot be used, `size_bytes` holds no slot, or a live process owns
          the slab;
        - MismatchError: the file is of another format, model or layout;
        - OSError: the disk refuses. ENOSPC, EDQUOT, EFBIG: there is no room for the file. Nothing of it
          is left, and the instance can serve without it.
        """
        path = directory / f"{name}.slab"
        planned = SegmentHeader.plan(size_bytes, fingerprint, layout)
        with _misplaced(directory), contextlib.ExitStack() as undo:
            lock_fd = _lock(path)
            undo.callback(os.close, lock_fd)
            header = _existing(path, planned) or _create(path, planned)
            with _descriptor(path, os.O_RDWR) as fd:
                mapping = memoryview(mmap.mmap(fd, header.pages_offset))
            slots_fd = _open_slots(path, header)
            undo.pop_all()
        return cls(path, header, header.page_table(mapping), slots_fd, lock_fd)

    def write(self, slot: int, block: memoryview) -> None:
        """Write a block. Blocking, without the GIL; threads may write different slots. Raises OSError.

        `block` has `slot_bytes` bytes and begins at an address that is a multiple of 4096.
        """
        assert len(block) == self.slot_bytes
        offset, num_done = self.header.page_offset(slot), 0
        while num_done < self.slot_bytes:
            num_done += self._advanced(os.pwritev(self._fd, [block[num_done:]], offset + num_done))

    def store(
        self, slot: int, block: memoryview, record: Record, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Write a block as `write` does, and then its record if `is_wanted` returns True at that time.

        While the block is written the slot has no record: neither the slot's former block nor the new block
        can be found.
        """
        with self._records:
            self.table.clear(slot)
            self.table.reserve(slot)
        self.write(slot, block)
        with self._records:
            if is_wanted():
                self.table.set_checksums(slot, range(self.table.num_layers), record.checksums)
                self.table.seal(slot, record.key, record.last_use, record.position, record.num_uses)

    def erase(self, slot: int, is_free: Callable[[], bool]) -> None:
        """Erase the record in `slot` if `is_free` returns True.

        `is_free` must return False if the slot has got another block meanwhile.
        """
        with self._records:
            if is_free():
                self.table.clear(slot)

    def read(self, slot: int, block: memoryview) -> None:
        """Read a block from a slot into `block`. The conditions of `write` apply."""
        assert len(block) == self.slot_bytes
        offset, num_done = self.header.page_offset(slot), 0
        while num_done < self.slot_bytes:
            num_done += self._advanced(os.preadv(self._fd, [block[num_done:]], offset + num_done))

    def _advanced(self, num_bytes: int) -> int:
        if num_bytes == 0:
            raise OSError(errno.EIO, "the slab ends early: was it truncated?", str(self.path))
        return num_bytes

    def close(self) -> None:
        """Close the slab. No read or write may be in flight, and the table must not be used afterwards."""
        os.close(self._fd)
        os.close(self._lock_fd)


def _lock(path: Path) -> int:
    """Lock the slab for this process, for as long as the returned descriptor is open.

    Raises ConfigError if another process has locked the slab, OSError if the lock file cannot be used.
    """
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, f"{os.getpid():<{_PID_DIGITS}}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, _PID_DIGITS, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"kvcache.ssd_dirs: {path} is in use by process {owner or '(unknown)'};"
            " end that one, or give each instance its own directory"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _existing(path: Path, planned: SegmentHeader) -> SegmentHeader | None:
    """Return the header of the file at `path`; None if there is no file, or if the file is damaged.

    Raises MismatchError for a file of another format, model or layout.
    """
    if not path.exists():
        return None
    with _descriptor(path, os.O_RDONLY) as fd:
        start = memoryview(os.pread(fd, ALIGNMENT, 0).ljust(ALIGNMENT, b"\0"))
        size_bytes = os.fstat(fd).st_size
    try:
        header = read_header(start, MAGIC, str(path))
    except msgspec.MsgspecError:
        header = None
    if header is None or header.size_bytes > size_bytes:
        log.warning("%s is damaged: nothing can be read from it, and it is made anew", path)
        return None
    for what, ours, theirs in (
        ("model fingerprint", planned.fingerprint, header.fingerprint),
        ("KV layout", planned.layout, header.layout),
    ):
        if ours != theirs:
            advice = "remove the file, or give each model its own directory in kvcache.ssd_dirs"
            raise MismatchError(f"{what} of {path}", ours, theirs, advice)
    if header != planned:
        log.warning(
            "%s keeps its %d slots (%d bytes) and what they hold, but kvcache.ssd_bytes asks for %d"
            " (%d bytes); to change that, end this instance and remove the file",
            path,
            header.num_pages,
            header.size_bytes,
            planned.num_pages,
            planned.size_bytes,
        )
    return header


def _create(path: Path, header: SegmentHeader) -> SegmentHeader:
    """Create an empty slab at `path`, all of its space allocated, and return its header. Raises OSError."""
    new_path = Path(f"{path}.new")
    for leftover in (path, new_path):
        leftover.unlink(missing_ok=True)
    _check_space(path.parent, header.size_bytes)
    try:
        with _descriptor(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.posix_fallocate(fd, 0, header.size_bytes)
            with mmap.mmap(fd, header.pages_offset) as mapping, memoryview(mapping) as buffer:
                write_header(buffer, MAGIC, header)
            os.fsync(fd)
        new_path.rename(path)
    except BaseException:
        new_path.unlink(missing_ok=True)
        raise
    return header


def _check_space(directory: Path, size_bytes: int) -> None:
    """Check that the directory has space. Raises OSError.

    Without this check the file system would first give all of its space to the slab, and other processes
    would have none.
    """
    disk = os.statvfs(directory)
    available_bytes = disk.f_bavail * disk.f_frsize
    if available_bytes < size_bytes:
        raise OSError(
            errno.ENOSPC,
            f"a slab needs {size_bytes} bytes, the disk has {available_bytes};"
            " free some or lower kvcache.ssd_bytes",
            str(directory),
        )


def _open_slots(path: Path, header: SegmentHeader) -> int:
    """Return a descriptor for the slots. It bypasses the page cache if the file system has O_DIRECT."""
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            with mmap.mmap(-1, ALIGNMENT) as page:  # some file systems refuse only when it comes to reading
                os.preadv(fd, [page], header.pages_offset)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
        else:
            undo.pop_all()
            return fd
    log.warning("%s: its file system has no O_DIRECT; blocks go through the page cache", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, _MODE)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _misplaced(directory: Path) -> Iterator[None]:
    """Make a context that turns an error of an unusable directory into ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MISPLACED:
            raise
        raise ConfigError(
            f"kvcache.ssd_dirs: cannot use {directory} ({error.strerror}: {error.filename});"
            " create that directory and make it writable, or name another"
        ) from None
