"""The instruction sets that this machine's processor can run: every test of the kernels runs on each."""

from pathlib import Path

import pytest
import torch

from kernels.cpu.library import Isa, Library, load_library, supported_isas

SUPPORTED = supported_isas(Path("/proc/cpuinfo").read_text())
DTYPES = [torch.float32, torch.bfloat16]

on_every_isa = pytest.mark.parametrize("isa", SUPPORTED, ids=lambda isa: isa.value)


def library_of(isa: Isa) -> Library:
    """Compiled once a machine. Fails without a compiler: then nothing here would be tested."""
    return load_library(isa)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
