"""Checks of NVIDIA GPUs, of the access of RDMA cards to their memory, and of the NICs near each memory.

Owns: these checks. Does not know: CUDA, transfers.
"""

import re
from collections.abc import Iterator

from messenger.doctor.findings import Finding, Level
from messenger.doctor.machine import Machine
from messenger.doctor.rdma import DEVICES
from messenger.rdma.topology import Choice, NicKind, Topology, find_gpus
from mooncake.config.settings import Config

_FIRST_KERNEL_WITH_DMA_BUF = (5, 12)
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def gpus(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about access to the machine's GPUs."""
    num_gpus = len(find_gpus(machine.root / "sys"))
    files = [name for name in machine.names("dev") if re.fullmatch(r"nvidia\d+", name)]
    needs_gpu = config.worker.device.startswith("cuda") and config.runs_instances
    if files and machine.is_usable("dev/nvidiactl"):
        driver = re.search(r"\b\d{3,}\.[\d.]+", machine.read("proc/driver/nvidia/version") or "")
        yield Finding(
            Level.OK, "gpu", f"{len(files)} NVIDIA GPUs, driver {driver[0] if driver else 'unknown'}"
        )
    elif num_gpus:
        advice = (
            "start the container with --gpus all"
            if machine.is_container
            else "install and load NVIDIA's driver: nvidia-smi must list the GPUs"
        )
        level = Level.FAIL if needs_gpu else Level.WARN
        yield Finding(
            level, "gpu", f"{num_gpus} NVIDIA GPUs, but this process cannot open /dev/nvidia*", advice
        )
    elif needs_gpu:
        found = f"worker.device is {config.worker.device}, and this machine has no NVIDIA GPU"
        yield Finding(Level.FAIL, "gpu", found, "set worker.device to auto or cpu")
    else:
        yield Finding(Level.OK, "gpu", "no NVIDIA GPU here: workers compute on the CPU")


def peer_memory(machine: Machine) -> Iterator[Finding]:
    """Yield findings about direct access of RDMA cards to GPU memory (GPUDirect).

    Yields nothing without RDMA card or GPU driver.
    """
    version = machine.read("proc/driver/nvidia/version")
    if version is None or not machine.names(DEVICES):
        return
    module = next((name for name in _PEER_MODULES if machine.exists(f"sys/module/{name}")), None)
    if machine.kernel >= _FIRST_KERNEL_WITH_DMA_BUF and "Open Kernel Module" in version:
        yield Finding(Level.OK, "gpudirect", "by dma-buf (open kernel modules)")
    elif module is not None:
        yield Finding(Level.OK, "gpudirect", f"by the module {module}")
    else:
        found = "neither dma-buf nor a peer-memory module: RDMA from GPU memory goes through host memory"
        advice = "modprobe nvidia_peermem, or NVIDIA's open kernel modules on a kernel from 5.12 on"
        yield Finding(Level.WARN, "gpudirect", found, advice)


def nearest_nics(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield the finding that says which NICs transfers use for which memory.

    The NICs are RDMA devices if there are any, else Ethernet interfaces. Raises ConfigError for an invalid
    configured matrix.
    """
    sys_root, written = machine.root / "sys", config.messenger.topology
    kind = NicKind.RDMA if machine.names(DEVICES) else NicKind.ETHERNET
    if written is not None and config.messenger.transport in ("auto", "rdma"):
        topology = Topology.parse(written, sys_root)
    else:
        topology = Topology.discover(sys_root, machine.environ, kind)
    if not any(map(topology.order, topology.matrix)):
        what = "RDMA device is active" if kind is NicKind.RDMA else "network interface but loopback is up"
        yield Finding(Level.OK, "topology", f"no {what}")
        return
    by_choice: dict[Choice, list[str]] = {}
    for location, choice in topology.matrix.items():
        by_choice.setdefault(choice, []).append(location)
    texts = [f"{', '.join(locations)} -> {_describe(choice)}" for choice, locations in by_choice.items()]
    yield Finding(Level.OK, "topology", "; ".join(texts))


def _describe(choice: Choice) -> str:
    then = f", then {', '.join(choice.secondary)}" if choice.secondary else ""
    return ", ".join(choice.preferred) + then
