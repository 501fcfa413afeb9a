"""The compiled libraries of the CPU's kernels, one for each instruction set.

    python -m kernels.cpu.library       (compiles, and says what will be used)

The best instruction set of the processor is used. The environment variable MOONCAKE_CPU_KERNELS forces a
lower instruction set (`avx512`, `avx2`), or `torch` in place of compiled kernels.

Owns: the choice, made once a process; the one warning that torch computes instead. Does not know: tensors.
"""

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from mooncake.native import NativeCodeError, load

log = logging.getLogger(__name__)

ENV = "MOONCAKE_CPU_KERNELS"
DTYPES = (torch.bfloat16, torch.float32)
_TORCH = "torch"
_SOURCE = Path(__file__).parent / "native" / "kernels.cpp"
# No operations are fused but those that are written out: so code compiled in two places gives the same bits.
_FLAGS = ("-ffp-contract=off", "-pthread")


class Isa(Enum):
    """The instruction sets with kernels, the best first."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"


_ARCHITECTURE = {
    Isa.AMX: ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    Isa.AVX512_BF16: ("-march=x86-64-v4", "-mavx512bf16"),
    Isa.AVX512: ("-march=x86-64-v4",),
    Isa.AVX2: ("-march=x86-64-v3",),
}
_AVX2_FLAGS = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512_FLAGS = _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEEDED_FLAGS = {
    Isa.AMX: _AVX512_FLAGS | {"avx512_bf16", "amx_tile", "amx_bf16"},
    Isa.AVX512_BF16: _AVX512_FLAGS | {"avx512_bf16"},
    Isa.AVX512: _AVX512_FLAGS,
    Isa.AVX2: _AVX2_FLAGS,
}


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels of one instruction set."""

    isa: Isa
    code: ctypes.CDLL

    @functools.cache  # noqa: B019  (libraries live as long as their process)
    def function(self, name: str, dtype: torch.dtype, *argtypes: Any) -> Any:
        """Return the compiled function `name` for tensors of `dtype`, bfloat16 or float32.

        The compiled function returns an int or nothing. Raises ValueError for another dtype.
        """
        if dtype not in DTYPES:
            raise ValueError(f"expected one of {', '.join(map(str, DTYPES))}, got {dtype}")
        function = self.code[f"{name}_{str(dtype).removeprefix('torch.')}"]
        function.argtypes = argtypes
        return function

    def set_num_threads(self, num_threads: int) -> None:
        """Set the number of threads of all kernels in this process, the caller's included (idle_cores.h).

        The number is 1 at first. Waits until no other thread computes.
        """
        self.code.set_num_threads(num_threads)

    def be_guest(self) -> None:
        """Make the calling thread a guest (idle_cores.h).

        A guest computes for another process, beside the thread that computes for this process.
        """
        self.code.be_guest()

    @property
    def num_placements(self) -> int:
        """The number of times that threads have been moved to other cores."""
        return int(self.code.num_placements())


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The choice of CPU kernels. If `library` is None, torch computes, and `reason` says why."""

    library: Library | None
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the instruction set, or `torch`, as metrics and logs show it."""
        return _TORCH if self.library is None else self.library.isa.value


def supported_isas(cpuinfo: str) -> list[Isa]:
    """Return the instruction sets of a processor with this text of /proc/cpuinfo, the best first."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(values.split()) for key, _, values in lines if key.strip() == "flags"), set())
    return [isa for isa in Isa if flags >= _NEEDED_FLAGS[isa]]


@functools.cache
def load_library(isa: Isa) -> Library:
    """Return the kernels of an instruction set, compiled at the first call, in some seconds.

    Raises NativeCodeError if the kernels cannot be compiled, or if this process may not use the processor's
    tile registers.
    """
    library = Library(isa, load(_SOURCE, (*_ARCHITECTURE[isa], *_FLAGS)))
    if isa is Isa.AMX and not library.code.may_use_tiles():
        raise NativeCodeError("the operating system gives this process none of the processor's tiles")
    return library


def choose() -> KernelChoice:
    """Return the kernels for this machine's CPU. Warns, once a process, if torch has to compute.

    Raises ValueError if MOONCAKE_CPU_KERNELS names kernels that this machine does not have.
    """
    return _choose(os.environ.get(ENV, "auto"))


@functools.cache
def _choose(wanted: str) -> KernelChoice:
    if wanted == _TORCH:
        return KernelChoice(None, f"{ENV}={wanted}")
    try:
        supported = supported_isas(Path("/proc/cpuinfo").read_text())
    except OSError:
        supported = []
    if wanted != "auto" and wanted not in [isa.value for isa in supported]:
        known = ", ".join(["auto", *(isa.value for isa in supported), _TORCH])
        raise ValueError(f"{ENV}: this processor has {known}, got {wanted!r}")
    if not supported:
        return _warned(f"this processor ({os.uname().machine}) has none of {', '.join(i.value for i in Isa)}")
    why = ""
    for isa in supported if wanted == "auto" else [Isa(wanted)]:
        try:
            return KernelChoice(load_library(isa))
        except NativeCodeError as error:  # an older compiler does not know the latest instructions
            why = why or str(error)
    return _warned(why)


def _warned(reason: str) -> KernelChoice:
    log.warning("torch computes on the CPU, at about half the speed: %s", reason)
    return KernelChoice(None, reason)


if __name__ == "__main__":
    choice = choose()
    print(choice.name, " ".join(choice.reason.split()))
