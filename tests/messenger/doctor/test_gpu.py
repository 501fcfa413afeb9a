"""GPUs, and the NICs near by."""

import pytest

from messenger.doctor import gpu
from messenger.doctor.findings import Level
from mooncake.errors import ConfigError
from tests.messenger.doctor.machines import FakeMachine, config, only
from tests.messenger.trees import add_gpu, add_nodes, add_rdma, write

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19"


def test_gpus_that_can_be_opened_are_counted(machine: FakeMachine) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(machine.root, f"dev/{name}", "")
    for version, number in ((OPEN, "570.86.15"), (CLOSED, "535.104.05")):
        write(machine.root, "proc/driver/nvidia/version", version)
        assert only(gpu.gpus(machine, config())).found == f"2 NVIDIA GPUs, driver {number}"


def test_gpus_that_cannot_be_opened_fail_if_they_are_needed(machine: FakeMachine) -> None:
    assert only(gpu.gpus(machine, config())).level is Level.OK
    assert only(gpu.gpus(machine, config(worker={"device": "cuda"}))).level is Level.FAIL
    add_gpu(machine.root, ("0000:17:01.0", "0000:18:00.0"), 0)
    assert only(gpu.gpus(machine, config())).level is Level.WARN
    write(machine.root, ".dockerenv", "")
    finding = only(gpu.gpus(machine, config(worker={"device": "cuda:0"})))
    assert (finding.level, finding.advice) == (Level.FAIL, "start the container with --gpus all")


@pytest.mark.parametrize(
    ("version", "kernel", "module", "level"),
    [
        (OPEN, "5.15.0", None, Level.OK),
        (OPEN, "5.4.0", None, Level.WARN),
        (CLOSED, "6.1.0", None, Level.WARN),
        (CLOSED, "5.4.0", "nvidia_peermem", Level.OK),
    ],
)
def test_gpudirect_needs_dma_buf_or_a_module(
    machine: FakeMachine, version: str, kernel: str, module: str | None, level: Level
) -> None:
    add_rdma(machine.root, "mlx5_0")
    write(machine.root, "proc/driver/nvidia/version", version)
    write(machine.root, "proc/sys/kernel/osrelease", kernel)
    if module is not None:
        (machine.root / "sys/module" / module).mkdir(parents=True)
    assert only(gpu.peer_memory(machine)).level is level


def test_the_topology_is_shown(machine: FakeMachine) -> None:
    assert "loopback" in only(gpu.nearest_nics(machine, config())).found
    add_nodes(machine.root, 0, 1)
    add_rdma(machine.root, "mlx5_0", ("0000:17:01.0", "0000:18:00.0"), 0)
    add_rdma(machine.root, "mlx5_1", ("0000:80:01.0", "0000:81:00.0"), 1)
    add_gpu(machine.root, ("0000:17:01.0", "0000:19:00.0"), 0)
    found = only(gpu.nearest_nics(machine, config())).found
    assert found == "cpu:0, cuda:0 -> mlx5_0, then mlx5_1; cpu:1 -> mlx5_1, then mlx5_0"


def test_a_topology_that_is_written_down_is_shown_or_refused(machine: FakeMachine) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        add_rdma(machine.root, name)

    def found(text: str, transport: str = "auto") -> str:
        settings = config(messenger={"topology": text, "transport": transport})
        return only(gpu.nearest_nics(machine, settings)).found

    written = '{"cpu:0": [["mlx5_1"], ["mlx5_0"]]}'
    assert found(written) == "cpu:0 -> mlx5_1, then mlx5_0"
    assert found(written, "tcp") == "cpu:0 -> mlx5_0, mlx5_1"
    assert "no RDMA device" in found("{}")
    with pytest.raises(
        ConfigError, match=r"messenger\.topology: cpu:0 names mlx5_9, which this machine does not"
    ):
        found('{"cpu:0": [["mlx5_9"], []]}')
