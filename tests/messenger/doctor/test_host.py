"""Python, memory, limits, clock, key."""

from pathlib import Path

import pytest

from messenger.doctor import host
from messenger.doctor.findings import Level
from mooncake.errors import ConfigError
from mooncake.security.keys import ClusterKey
from tests.messenger.doctor.machines import GIB, FakeMachine, config, only
from tests.messenger.trees import write


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11), Level.OK), ((3, 10), Level.FAIL), ((3, 14), Level.FAIL)]
)
def test_python_is_supported_or_not(machine: FakeMachine, version: tuple[int, int], level: Level) -> None:
    assert only(host.python(machine, version)).level is level


def test_native_code_that_cannot_be_built_is_slower_and_not_fatal() -> None:
    def load(source: Path) -> object:
        raise ConfigError("c++ cannot compile:\n" + "much to read\n" * 1000)

    finding = only(host.native_code(load, [Path("checksums.cpp"), Path("streams.cpp")]))
    assert finding.level is Level.WARN
    assert finding.found.startswith("c++ cannot compile: much to read much")
    assert len(finding.found) <= 300
    assert "more slowly" in finding.advice


def test_native_code_names_what_was_built() -> None:
    assert "checksums.cpp" in only(host.native_code(str, [Path("checksums.cpp")])).found


def test_cpu_kernels_name_the_instruction_set() -> None:
    finding = only(host.cpu_kernels(lambda: "avx512"))
    assert (finding.level, finding.found) == (Level.OK, "compiled and loaded for avx512")


def test_torch_instead_of_the_cpu_kernels_is_slower_and_not_fatal() -> None:
    finding = only(host.cpu_kernels(lambda: "torch no C++ compiler:\nc++ is not installed"))
    assert finding.level is Level.WARN
    assert finding.found == "torch computes: no C++ compiler: c++ is not installed"
    assert "half as fast" in finding.advice


def test_pools_larger_than_the_memory_fail(machine: FakeMachine) -> None:
    pair = {"num_prefill": 1, "num_decode": 1}
    assert only(host.memory(machine, config(**pair, kvcache={"pool_bytes": 16 * GIB}))).level is Level.OK
    finding = only(host.memory(machine, config(**pair, kvcache={"pool_bytes": 17 * GIB})))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        "the pools take 34 GiB, 32 GiB of memory are available",
    )
    assert "kvcache.pool_bytes" in finding.advice


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/pod/main", {"pod/memory.max": "2147483648", "pod/memory.current": "1610612736"}),
        (
            "4:cpu,memory:/pod",
            {
                "memory/pod/memory.limit_in_bytes": "2147483648",
                "memory/pod/memory.usage_in_bytes": "1610612736",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
            },
        ),
        ("0::/gone", {"memory.max": "2147483648", "memory.current": "1610612736"}),  # seen from a container
    ],
)
def test_the_tightest_control_group_counts(machine: FakeMachine, line: str, files: dict[str, str]) -> None:
    write(machine.root, "proc/self/cgroup", f"1:name=systemd:/\n{line}")
    for path, text in files.items():
        write(machine.root, f"sys/fs/cgroup/{path}", text)
    finding = only(host.memory(machine, config()))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        "the pool takes 1 GiB, 512 MiB are left in this control group",
    )


def test_cached_files_count_as_room_in_a_control_group(machine: FakeMachine) -> None:
    write(machine.root, "proc/self/cgroup", "0::/")
    for name, text in (
        ("max", 3 * GIB),
        ("current", 2 * GIB),
        ("stat", f"active_file {GIB // 2}\ninactive_file {GIB // 2}\nshmem {GIB}"),
    ):
        write(machine.root, f"sys/fs/cgroup/memory.{name}", text)
    assert only(host.memory(machine, config())).found.endswith("2 GiB are left in this control group")


def test_the_file_system_of_the_segments_counts(machine: FakeMachine) -> None:
    settings = config(kvcache={"segment_dir": machine.root, "pool_bytes": "8GiB"})

    class Small(FakeMachine):
        def free_bytes(self, folder: Path) -> int | None:
            return 64 << 20

    finding = only(host.memory(Small(machine.root), settings))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        f"the pool takes 8 GiB, 64 MiB are free in {machine.root}",
    )


def test_running_pools_have_their_memory_already(machine: FakeMachine) -> None:
    write(machine.root, "proc/77/cmdline", "python\0-m\0kvstore.server.service")
    assert only(host.memory(machine, config(kvcache={"pool_bytes": "1TiB"}))).level is Level.OK


def test_few_open_files_are_a_warning(machine: FakeMachine) -> None:
    assert only(host.open_files(machine, config())).level is Level.OK
    finding = only(host.open_files(machine, config(conductor={"max_running_requests": 1000})))
    assert (finding.level, finding.found) == (Level.WARN, "1024 files may be open, 1512 can be needed")


@pytest.mark.parametrize(
    ("mode", "pool_bytes", "level"),
    [("never", "64GiB", Level.WARN), ("never", "1GiB", Level.OK), ("advise", "64GiB", Level.OK)],
)
def test_huge_pages_matter_to_large_pools(
    machine: FakeMachine, mode: str, pool_bytes: str, level: Level
) -> None:
    text = "always within_size advise never deny force".replace(mode, f"[{mode}]")
    write(machine.root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", text)
    assert only(host.huge_pages(machine, config(kvcache={"pool_bytes": pool_bytes}))).level is level


@pytest.mark.parametrize(("source", "level"), [("tsc", Level.OK), ("hpet", Level.WARN)])
def test_a_slow_clock_is_a_warning(machine: FakeMachine, source: str, level: Level) -> None:
    write(machine.root, "sys/devices/system/clocksource/clocksource0/current_clocksource", source)
    command = "timedatectl show --property=NTPSynchronized --value"
    finding = only(host.clock(FakeMachine(machine.root, outputs={command: "yes"})))
    assert finding.level is level
    assert finding.found.startswith(f"{source}, synchronised;")


def test_a_bad_key_file_fails_with_its_reason(tmp_path: Path) -> None:
    def load(path: Path) -> ClusterKey:
        raise ConfigError(f"{path} can be read by others")

    finding = only(host.cluster_key(tmp_path / "key", load, config()))
    assert (finding.level, finding.found) == (Level.FAIL, f"{tmp_path / 'key'} can be read by others")


def test_a_key_is_named_by_its_id(tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.save(tmp_path / "key")
    finding = only(host.cluster_key(tmp_path / "key", ClusterKey.load, config()))
    assert finding.level is Level.OK
    assert key.key_id in finding.found
    (tmp_path / "key").chmod(0o644)
    assert only(host.cluster_key(tmp_path / "key", ClusterKey.load, config())).level is Level.FAIL


def test_a_key_is_missed_only_where_one_is_needed() -> None:
    assert only(host.cluster_key(None, ClusterKey.load, config())).level is Level.OK
    assert only(host.cluster_key(None, ClusterKey.load, config(role="prefill"))).level is Level.FAIL
