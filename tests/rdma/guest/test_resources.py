"""Nothing is left behind: counted by the kernel."""

import ctypes
import gc
import os
import re
import subprocess
from collections import Counter

import pytest

from messenger.rdma import windows
from messenger.rdma.errors import RdmaError
from messenger.transport.exposures import Range
from tests.rdma.guest.nodes import joined, node, two_nodes


def verbs_objects() -> Counter[str]:
    """Objects of both devices, by kind."""
    listing = subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for name, count in re.findall(r"\b(pd|cq|qp|mr|ctx) (\d+)", listing):
        found[name] += int(count)
    return found


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated_bytes() -> int:
    """By C code and not freed; Python's own objects are elsewhere."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    return int(mallinfo2().uordblks)


@pytest.mark.parametrize("num_connections", [10, pytest.param(100, marks=pytest.mark.soak)])
async def test_connections_leave_nothing(num_connections: int) -> None:
    with node("rxe0") as here, node("rxe1") as there:
        with joined(here, there):
            pass
        objects, descriptors = verbs_objects(), num_descriptors()
        with joined(here, there):
            assert verbs_objects()["qp"] == objects["qp"] + 2
        for n in range(num_connections):
            with joined(here, there) as (ours, theirs):
                await windows.open_windows(theirs, there.memory, [Range(0, 100)])
                if n % 2:
                    with pytest.raises(RdmaError):
                        await ours.write([(0, there.memory.address, 100)], 1)
                else:
                    await ours.write([(0, there.memory.address, 100)], there.memory.remote_key)
        assert verbs_objects() == objects
        assert num_descriptors() == descriptors


async def test_closed_adapters_leave_nothing() -> None:
    with two_nodes():
        pass
    objects, descriptors = verbs_objects(), num_descriptors()
    for _ in range(10):
        with two_nodes() as (_here, there, endpoint, _other):
            await endpoint.write([(0, there.memory.address, 100)], there.memory.remote_key)
    assert verbs_objects() == objects
    assert num_descriptors() == descriptors


@pytest.mark.parametrize("num_rounds", [20, pytest.param(50, marks=pytest.mark.soak)])
async def test_transfers_and_windows_do_not_add_up_in_memory(num_rounds: int) -> None:
    with two_nodes() as (_here, there, endpoint, other):
        other.adapter.has_windows = True

        async def work(num_times: int) -> None:
            slices = [(n * 2, there.memory.address + n * 4, 1) for n in range(32)]
            for _ in range(num_times):
                await endpoint.write(slices, there.memory.remote_key)
                windows.close_windows(
                    other, await windows.open_windows(other, there.memory, [Range(0, 9)] * 32)
                )

        await work(10)
        before = allocated_bytes()
        await work(num_rounds)  # a leaked request or range is at least 32 bytes
        assert allocated_bytes() - before < num_rounds * 32 * 32 // 2
