"""The names of devices.

Owns: where names are read. Does not know: how devices are chosen.
"""

import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(CPUINFO)


def processor_name(cpuinfo: Path) -> str:
    """Return the processor's name from `cpuinfo`, or its architecture if `cpuinfo` has no name, as on ARM."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (
        value.strip()
        for key, _, value in (line.partition(":") for line in lines)
        if key.strip() == "model name"
    )
    return next(names, platform.machine())
