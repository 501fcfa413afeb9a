"""The machine that the checks examine. In tests a file tree stands for a machine.

Owns: reading of procfs, sysfs and /dev, commands with a deadline, questions to the network stack. Does not
know: the meaning of the answers.
"""

import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from messenger.rdma.topology import read_line

COMMAND_TIMEOUT_S = 2.0
"""Time limit of a command in seconds; a check may run two commands."""
_CAP_NET_BIND_SERVICE = 10
_CAP_IPC_LOCK = 14


class MachineProcess(NamedTuple):
    """A process of this machine. `name` is the module if the process runs `python -m`, else its command."""

    pid: int
    name: str


@dataclass(frozen=True)
class Machine:
    """A machine under examination. Paths are relative to `root`, as in `proc/meminfo`."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self, path: str) -> str | None:
        """Return the text of a file, stripped; None if it is missing or cannot be read."""
        return read_line(self.root / path)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; an empty list if it is missing."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def is_usable(self, path: str) -> bool:
        """Return whether this process may read and write the file."""
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def run(self, *command: str) -> str | None:
        """Return a command's output; None if the command is not installed, fails, or takes too long."""
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if result.returncode else result.stdout.strip()

    def free_bytes(self, folder: Path) -> int | None:
        """Return the free bytes in the file system of `folder`; None if they cannot be read."""
        try:
            status = os.statvfs(folder)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    def resolve(self, host: str) -> list[str]:
        """Return the IP addresses of a host name. Raises OSError."""
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def has_address(self, address: str) -> bool:
        """Return whether this machine can listen at an IP address."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    @property
    def is_container(self) -> bool:
        """Whether this is a container, as far as can be told from inside."""
        marks = self.exists(".dockerenv") or self.exists("run/.containerenv")
        return marks or "KUBERNETES_SERVICE_HOST" in self.environ

    @property
    def kernel(self) -> tuple[int, int]:
        """The version of the kernel: (6, 1); (0, 0) if unknown."""
        numbers = re.match(r"(\d+)\.(\d+)", self.read("proc/sys/kernel/osrelease") or "")
        return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

    @property
    def may_lock_all_memory(self) -> bool:
        """Whether this process may lock any amount of memory.

        It may if it has CAP_IPC_LOCK outside of user namespaces.
        """
        users = (self.read("proc/self/uid_map") or "").split()
        return users == ["0", "0", "4294967295"] and self._is_capable(_CAP_IPC_LOCK)

    @property
    def may_use_low_ports(self) -> bool:
        return self._is_capable(_CAP_NET_BIND_SERVICE)

    def _is_capable(self, number: int) -> bool:
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)", self.read("proc/self/status") or "", re.MULTILINE)
        return effective is not None and bool(int(effective[1], 16) >> number & 1)

    def limit(self, name: str) -> int | None:
        """Return a limit of this process by its name in /proc/self/limits; None if unlimited or unknown."""
        line = re.search(rf"^{name}\s+(\S+)", self.read("proc/self/limits") or "", re.MULTILINE)
        return int(line[1]) if line is not None and line[1].isdecimal() else None

    def processes(self) -> Iterator[MachineProcess]:
        """Yield all processes that can be seen."""
        for pid in filter(str.isdecimal, self.names("proc")):
            words = (self.read(f"proc/{pid}/cmdline") or "").split("\0")
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else None
            yield MachineProcess(int(pid), module or self.read(f"proc/{pid}/comm") or "?")

    def owner_of_socket(self, inode: int) -> MachineProcess | None:
        """Return the process that has a socket open; None if no process that can be seen has it."""
        for process in self.processes():
            folder = f"proc/{process.pid}/fd"
            for name in self.names(folder):
                try:
                    target = os.readlink(self.root / folder / name)
                except OSError:
                    continue
                if target == f"socket:[{inode}]":
                    return process
        return None
