"""Memory that an RDMA device may read and write by itself.

Host memory is registered by address. Device memory (a GPU's) is registered by the dma-buf descriptor that its
driver exports; this works only on a machine with both a GPU and an RDMA card.

Owns: registrations and why they fail. Does not know: who may use which range (`windows`), peers.
"""

import errno
import resource
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import Any, Final

from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.verbs import load_verbs

LOCAL_WRITE: Final = 1  # enum ibv_access_flags
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4
WINDOW_BIND: Final = 16
OPEN: Final = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ


@dataclass(slots=True)
class RdmaMemory:
    """A registered memory range, whose addresses for peers begin at `address`.

    The `remote_key` of memory that is registered with `OPEN` gives any peer with a connected queue pair
    access to all of it, so only trusted peers may get this key.
    """

    address: int
    size_bytes: int
    local_key: int
    remote_key: int
    region: Any = field(repr=False)
    pin: c_char | None = field(repr=False)
    """The buffer, which is kept mapped; None for device memory."""

    def close(self) -> None:
        self.region.close()
        self.pin = None


def register_range(domain: Any, device: str, pin: c_char, size_bytes: int, rights: int) -> RdmaMemory:
    """Register `size_bytes` bytes from `pin` on. Raises RdmaUnavailableError with the remedy."""
    verbs = load_verbs()
    try:
        region = verbs.mr.MR(domain, size_bytes, rights, address=addressof(pin))
    except verbs.Error as error:
        raise RdmaUnavailableError(
            f"{device} cannot register {size_bytes} bytes of memory: {_advice(error)}"
        ) from error
    return RdmaMemory(addressof(pin), size_bytes, region.lkey, region.rkey, region, pin)


def register_dmabuf(domain: Any, device: str, fd: int, offset: int, size_bytes: int) -> RdmaMemory:
    """Register `size_bytes` bytes of the dma-buf `fd`, from `offset` on.

    The peer addresses the first of these bytes as `offset`. Raises RdmaUnavailableError.
    """
    verbs = load_verbs()
    try:
        region = verbs.mr.DmaBufMR(domain, size_bytes, OPEN, dmabuf=fd, offset=offset)
    except verbs.Error as error:
        raise RdmaUnavailableError(
            f"{device} cannot register device memory ({size_bytes} bytes of a dma-buf): {error};"
            " copy it through pinned host memory instead"
        ) from error
    return RdmaMemory(offset, size_bytes, region.lkey, region.rkey, region, None)


def _advice(error: Exception) -> str:
    if getattr(error, "error_code", None) not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        return str(error)
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return f"{error}; the device or the machine is out of memory"
    return (
        f"only {soft} bytes may be locked; raise the limit with `ulimit -l unlimited`,"
        " `LimitMEMLOCK=infinity` (systemd) or `--ulimit memlock=-1` (containers)"
    )
