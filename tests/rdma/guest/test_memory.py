"""Registering memory, and what happens where that cannot be done."""

import mmap
import os
import resource
import subprocess
import sys

import pytest

from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
from messenger.rdma.errors import RdmaUnavailableError
from messenger.transport.transports import Remedy
from tests.rdma.guest.nodes import MIB, joined, node

NOBODY = 65534


async def test_descriptor_that_the_device_cannot_map_is_a_clean_error() -> None:
    with node("rxe0") as here:
        descriptor = os.memfd_create("no dma-buf")
        try:
            with pytest.raises(RdmaUnavailableError, match="cannot register device memory") as caught:
                here.adapter.register_dmabuf(descriptor, 0, 4096)
        finally:
            os.close(descriptor)
        assert caught.value.remedy is Remedy.OTHER_PATH
        with node("rxe1") as there, joined(here, there) as (endpoint, _other):
            await endpoint.write([(0, there.memory.address, MIB)], there.memory.remote_key)


def test_same_range_is_registered_once() -> None:
    with node("rxe0") as here:
        memory = here.adapter.register(here.buffer)
        assert here.adapter.register(here.buffer) is memory
        assert here.adapter.register(here.buffer[:4096]) is not memory


def test_registered_memory_stays_mapped_until_the_adapter_closes() -> None:
    (device,), _reasons = find_devices(["rxe0"])
    adapter, mapping = Adapter(device), mmap.mmap(-1, MIB)
    with memoryview(mapping) as view:
        adapter.register(view)
    with pytest.raises(BufferError):
        mapping.close()
    adapter.close()
    mapping.close()


def test_memory_lock_limit_is_an_error_that_says_what_to_do() -> None:
    program = f"""
import mmap, os, resource
from messenger.rdma.adapter import Adapter
from messenger.rdma.devices import find_devices
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setuid({NOBODY})
Adapter(find_devices(["rxe0"]).devices[0]).register(memoryview(mmap.mmap(-1, {MIB})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RdmaUnavailableError: rxe0/1 cannot register 1048576 bytes of memory" in done.stderr
    assert "only 65536 bytes may be locked; raise the limit with `ulimit -l unlimited`" in done.stderr


def test_memory_that_is_not_there_is_another_error() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    (device,), _reasons = find_devices(["rxe0"])
    adapter, descriptor = Adapter(device), os.memfd_create("short")
    os.ftruncate(descriptor, 4096)
    mapping = mmap.mmap(descriptor, 4096)
    os.ftruncate(descriptor, 0)
    with pytest.raises(RdmaUnavailableError, match="Bad address"):
        adapter.register(memoryview(mapping))
    adapter.close()
    os.close(descriptor)
