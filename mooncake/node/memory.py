"""The memory that is left on this machine, and in the control groups of this process.

Owns: the reading of the kernel's files. Does not know: what needs memory.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_V2 = "sys/fs/cgroup", "memory.max", "memory.current"
"""The folder of version 2 of control groups, and the names of a group's files with limit and usage."""
_V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that this process may still take; None if unknown.

    Files are read in `root`.
    """
    known = [num_bytes for num_bytes in (machine_bytes(root), group_bytes(root)) if num_bytes is not None]
    return min(known, default=None)


def machine_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that are available on the machine; None if unknown.

    Files are read in `root`.
    """
    line = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(line[1]) * 1024 if line is not None else None


def group_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory left in the tightest control group of this process.

    Returns None without a limit. Files are read in `root`.
    """
    left = []
    for group, limit_file, usage_file in _groups(root):
        limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():  # the limit is "max" where there is none
            # The kernel frees cached files when memory is needed.
            cached = re.findall(
                r"^(?:active|inactive)_file (\d+)", _text(group / "memory.stat"), re.MULTILINE
            )
            left.append(int(limit) - int(usage) + sum(map(int, cached)))
    return max(0, min(left)) if left else None


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield this process's control groups of memory and their parents, with the names of their files."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit_file, usage_file = _V2
        elif "memory" in controllers.split(","):
            base, limit_file, usage_file = _V1
        else:
            continue
        own = Path(path.strip("/"))
        for group in (own, *own.parents):
            yield root / base / group, limit_file, usage_file


def _text(path: Path) -> str:
    """Return a file's text; empty if the file is missing or cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
