"""The memory of a node's pools: one segment each, allocated at start, all at once.

Owns: segments and the files that keep them. Does not know: which pools there are
(`mooncake.node.plan`), what a segment holds.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from mooncake.config.sections import KVCacheConfig
from mooncake.errors import ConfigError
from mooncake.node.mapping import allocate
from mooncake.node.memory import available_bytes

GIB = 1 << 30
SMALLEST_POOL_BYTES = 1 << 16
LOCK_TIMEOUT_S = 3.0


def check_memory(names: Sequence[str], kvcache: KVCacheConfig) -> None:
    """Check that the pools with these `names` fit into memory, and are not too small for any block.

    Pools whose segment file exists take no further memory. Allocating more memory than there is would not
    fail, but some process would be killed. A size that is too small is most often a number without its unit.
    Raises ConfigError.
    """
    if names and kvcache.pool_bytes < SMALLEST_POOL_BYTES:
        raise ConfigError(
            f"kvcache.pool_bytes: {int(kvcache.pool_bytes)} bytes are too few for any block;"
            " a size takes a unit, such as 4GiB"
        )
    kept_in = kvcache.segment_dir
    new = [name for name in names if kept_in is None or not _segment_path(kept_in, name).exists()]
    wanted = len(new) * int(kvcache.pool_bytes)
    available = available_bytes()
    if available is not None and wanted > available:
        take = "the pool on this node takes" if len(new) == 1 else f"{len(new)} pools on this node take"
        raise ConfigError(
            f"kvcache.pool_bytes: {take} {wanted / GIB:.1f} GiB, "
            f"{available / GIB:.1f} GiB of memory are available on this node"
        )


def create_segment(name: str, size_bytes: int, directory: Path | None = None) -> int:
    """Return the descriptor of shared memory of `size_bytes`, all of it allocated.

    Without `directory` the memory is new, and ends with its last user. With `directory` it is the file
    `name`.segment there, whose contents are kept. The file is locked for the processes that have the
    descriptor. Raises ConfigError if the memory cannot be allocated, if the file has another size, or if
    another live process keeps the lock.
    """
    if directory is not None:
        return _segment_file(_segment_path(directory, name), size_bytes)
    descriptor = os.memfd_create(f"mooncake-{name}")
    return _allocated(descriptor, size_bytes, f"shared memory for {name}", is_new=True)


def _segment_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.segment"


def _segment_file(path: Path, size_bytes: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kvcache.segment_dir: cannot use {path}: {error.strerror}") from None
    if not _lock_file(descriptor):
        owner = _lock_owner(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        raise ConfigError(
            f"kvcache.segment_dir: {path} belongs to the live process {owner}, this is {os.getpid()};"
            " end that one first or name another directory"
        )
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes not in (0, size_bytes):
        os.close(descriptor)
        raise ConfigError(
            f"kvcache.segment_dir: {path} has {found_bytes} bytes, kvcache.pool_bytes is {size_bytes};"
            " give the pool the size of the file, or remove the file"
        )
    return _allocated(descriptor, size_bytes, str(path), is_new=not found_bytes)


def _lock_file(descriptor: int) -> bool:
    """Lock the file for the processes that have this descriptor: the supervisor, and its messenger.

    Returns False if another process keeps the lock. The call waits for a locked file, as the processes of a
    killed supervisor end a moment after the supervisor.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        else:
            return True


def _lock_owner(inode: int) -> str:
    """Return a text about the process that has locked a file, as the kernel reports it."""
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "FLOCK" in fields and fields[-3].endswith(f":{inode}"):
            return fields[-4]
    return "(unknown)"


def _allocated(descriptor: int, size_bytes: int, what: str, *, is_new: bool) -> int:
    try:
        if is_new:
            allocate(descriptor, size_bytes)
        else:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"kvcache.pool_bytes: no {size_bytes} bytes for {what}: {error.strerror}") from None
    return descriptor
