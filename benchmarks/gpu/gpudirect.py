"""The steps of GPUDirect RDMA, tried one by one, with the reasons why this machine does not allow them.

Device memory is exported as a dma-buf. An RDMA card registers the dma-buf, and then reads and writes the
memory by itself.

Owns: the attempts. Does not know: transfers.
"""

import ctypes
import os
from collections.abc import Callable

import torch

from benchmarks.report import Found, Report
from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
from messenger.rdma.errors import RdmaUnavailableError

_SIZE_BYTES = 4 << 20
_DMA_BUF_SUPPORTED = 124
"""The driver's attribute CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED."""
_DMA_BUF_FD = 1
"""The driver's handle type CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""


def run(report: Report) -> None:
    """Add a row for each step. A step that this machine does not allow is no error."""
    report.checks("GPUDirect RDMA: what this machine allows")
    memory = torch.zeros(_SIZE_BYTES, dtype=torch.uint8, device="cuda")
    steps: dict[str, Callable[[], str]] = {
        "the driver exports device memory as a dma-buf": _says_supported,
        f"a dma-buf of {_SIZE_BYTES >> 20} MiB": lambda: _exported(memory),
        "a card registers the dma-buf": lambda: _registered(memory),
    }
    for name, step in steps.items():
        report.check(name, lambda step=step: Found(True, _words_of(step)))  # type: ignore[misc]


def _words_of(step: Callable[[], str]) -> str:
    try:
        return step()
    except (OSError, RdmaUnavailableError) as error:
        return f"no: {error}"


def _says_supported() -> str:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), _DMA_BUF_SUPPORTED, torch.cuda.current_device())
    return "yes" if value.value else "no"


def _exported(memory: torch.Tensor) -> str:
    os.close(_dma_buf_of(memory))
    return "yes"


def _registered(memory: torch.Tensor) -> str:
    descriptor = _dma_buf_of(memory)
    try:
        devices, reasons = find_devices()
        for device in devices:
            adapter = Adapter(device)
            try:
                adapter.register_dmabuf(descriptor, 0, _SIZE_BYTES)
            finally:
                adapter.close()
        return f"yes: {', '.join(map(str, devices))}" if devices else f"no: {'; '.join(reasons)}"
    finally:
        os.close(descriptor)


def _dma_buf_of(memory: torch.Tensor) -> int:
    descriptor = ctypes.c_int(-1)
    address, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    _call(
        "cuMemGetHandleForAddressRange",
        ctypes.byref(descriptor),
        address,
        size,
        _DMA_BUF_FD,
        ctypes.c_uint64(),
    )
    return descriptor.value


def _call(name: str, *arguments: object) -> None:
    """Call the driver. Raises OSError with the driver's name of the error."""
    cuda = ctypes.CDLL("libcuda.so.1")
    status = getattr(cuda, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'').decode() or status}")
