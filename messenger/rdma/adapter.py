"""An opened RDMA device: the protection domain of its memory and queue pairs.

Owns: context, protection domain, registrations. Does not know: peers.
"""

from ctypes import addressof, c_char
from typing import Any, Final

from messenger.rdma.devices import RdmaDevice
from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.memory import (
    LOCAL_WRITE,
    WINDOW_BIND,
    RdmaMemory,
    register_dmabuf,
    register_range,
)
from messenger.rdma.verbs import load_verbs
from messenger.rdma.work import RDMA_READ, RDMA_WRITE, Chain

_SOFT_ROCE_VENDOR: Final = 0xFFFFFF
_WINDOW_TYPE_2: Final = 1 << 23 | 1 << 24  # IBV_DEVICE_MEM_WINDOW_TYPE_2A, _2B


class Adapter:
    """An opened RDMA device. Endpoints that use the device must be closed before it."""

    def __init__(self, device: RdmaDevice) -> None:
        verbs = load_verbs()
        self.device = device
        try:
            self.context: Any = verbs.device.Context(name=device.name)
            self.domain: Any = verbs.pd.PD(self.context)
            attributes = self.context.query_device()
        except verbs.Error as error:
            raise RdmaUnavailableError(f"RDMA device {device.name} cannot be opened: {error}") from error
        self.can_bind = bool(attributes.device_cap_flags & _WINDOW_TYPE_2)
        """Whether the device has memory windows of type 2."""
        self.has_windows = self.can_bind and attributes.vendor_id != _SOFT_ROCE_VENDOR
        """Whether the device enforces memory windows.

        Soft-RoCE does not: it checks the peer and the rights of a window, but not its range.
        """
        self.max_work_requests: int = min(attributes.max_qp_wr, attributes.max_cqe - 1)
        self.max_reads_out: int = attributes.max_qp_init_rd_atom
        self.max_reads_in: int = attributes.max_qp_rd_atom
        self._chains = {opcode: Chain(opcode) for opcode in (RDMA_WRITE, RDMA_READ)}
        self._ranges: dict[tuple[int, int], RdmaMemory] = {}
        """Registered memory by address and size."""
        self._dmabufs: list[RdmaMemory] = []

    def register(self, buffer: memoryview) -> RdmaMemory:
        """Register writable memory, and return the registration. Raises RdmaUnavailableError.

        The registration's remote key gives peers no access: peers reach memory only by ranges that are opened
        to them (`windows`). The same range is registered once. The buffer cannot be unmapped before `close`.
        """
        pin = c_char.from_buffer(buffer)
        place = addressof(pin), buffer.nbytes
        memory = self._ranges.get(place)
        if memory is None:
            rights = LOCAL_WRITE | (WINDOW_BIND if self.can_bind else 0)
            memory = register_range(self.domain, str(self.device), pin, buffer.nbytes, rights)
            self._ranges[place] = memory
        return memory

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int) -> RdmaMemory:
        """Register `size_bytes` bytes of the dma-buf `fd`, from `offset` on, and return the registration.

        A dma-buf exports device memory. The peer addresses the first of these bytes as `offset`. Raises
        RdmaUnavailableError if card or driver do not support this; then a pinned staging buffer is needed.
        """
        memory = register_dmabuf(self.domain, str(self.device), fd, offset, size_bytes)
        self._dmabufs.append(memory)
        return memory

    def chain(self, opcode: int) -> Chain:
        """Return the reusable requests of a chain, shared by all endpoints of this adapter."""
        return self._chains[opcode]

    def close(self) -> None:
        for memory in (*self._ranges.values(), *self._dmabufs):
            memory.close()
        self._ranges.clear()
        self._dmabufs.clear()
        self.domain.close()
        self.context.close()
