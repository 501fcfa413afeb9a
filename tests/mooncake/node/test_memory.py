from pathlib import Path

import pytest

from mooncake.node.memory import available_bytes
from tests.messenger.trees import write

GIB = 1 << 30


def test_a_limit_of_a_service_counts_though_its_group_is_not_the_root(tmp_path: Path) -> None:
    """A unit of systemd with MemoryMax= has its limit in a group of its own, or in a slice above."""
    write(tmp_path, "proc/meminfo", f"MemAvailable: {8 * GIB // 1024} kB")
    assert available_bytes(tmp_path) == 8 * GIB
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/mooncake-serve.service")
    group = "sys/fs/cgroup/system.slice"
    write(tmp_path, f"{group}/mooncake-serve.service/memory.max", "max")
    write(tmp_path, f"{group}/memory.max", str(4 * GIB))
    write(tmp_path, f"{group}/memory.current", str(3 * GIB))
    assert available_bytes(tmp_path) == GIB


@pytest.mark.parametrize("cgroup", ["0::/", "7:memory:/pod"])
def test_nothing_is_known_of_a_machine_without_files(tmp_path: Path, cgroup: str) -> None:
    write(tmp_path, "proc/self/cgroup", cgroup)
    assert available_bytes(tmp_path) is None
