"""The instruction sets that this machine's processor has. Every test of the kernels runs on each of them."""

from pathlib import Path

import pytest
import torch

from kernels.cpu.library import Isa, Library, load_library, supported_isas

SUPPORTED = supported_isas(Path("/proc/cpuinfo").read_text())
DTYPES = [torch.float32, torch.bfloat16]

on_every_isa = pytest.mark.parametrize("isa", SUPPORTED, ids=lambda isa: isa.value)


def library_of(isa: Isa) -> Library:
    """Return the compiled library, which is compiled once on each machine.

    The test fails without a compiler, because otherwise nothing here would be tested.
    """
    return load_library(isa)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normally distributed random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
