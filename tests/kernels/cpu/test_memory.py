"""Memory in huge pages."""

import ctypes
import mmap

import torch

from kernels.cpu.memory import HugeMemory, give_back_all, huge_zeros, populate


def test_memory_begins_with_a_huge_page_and_is_zero() -> None:
    tensor = huge_zeros((3, 1000), torch.bfloat16)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert (tensor.shape, tensor.dtype) == ((3, 1000), torch.bfloat16)
    assert not tensor.any()
    assert huge_zeros((0,), torch.float32).numel() == 0


def test_tensors_of_one_memory_are_aligned_and_do_not_overlap() -> None:
    memory = HugeMemory()
    sizes = [5, 1, 40 << 20, 1000, 3]  # one is larger than a chunk
    tensors = [memory.zeros((size,), torch.uint8) for size in sizes]
    for value, tensor in enumerate(tensors, 1):
        tensor.fill_(value)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert [int(tensor.float().mean()) for tensor in tensors] == [1, 2, 3, 4, 5]
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return how many of a tensor's bytes are in memory."""
    libc, num_pages = ctypes.CDLL(None), len(tensor) // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * num_pages)()
    address = ctypes.c_void_p(tensor.data_ptr())
    assert libc.mincore(address, ctypes.c_size_t(len(tensor)), resident) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in resident)


def test_populated_memory_is_there_before_it_is_used_and_keeps_its_content() -> None:
    memory = huge_zeros((16 << 20,), torch.uint8)
    memory[5] = 7
    assert resident_bytes(memory) <= 4 << 20
    populate(memory[: 8 << 20])
    assert resident_bytes(memory) == 8 << 20
    assert memory[5] == 7
    assert memory.sum() == 7


def test_neighbours_are_given_back_with_the_memory_page_that_they_share() -> None:
    memory = HugeMemory()
    tensors = [memory.zeros((3_000_001,), torch.uint8).fill_(7) for _ in range(4)]
    chunk = memory_pages(tensors[1].data_ptr(), tensors[3].data_ptr())
    assert resident_bytes(chunk) == len(chunk)
    give_back_all([tensors[2], tensors[1]])
    assert not resident_bytes(chunk)
    assert (tensors[0] == 7).all()
    assert (tensors[3] == 7).all()
    give_back_all([])


def memory_pages(first: int, end: int) -> torch.Tensor:
    """Return the whole pages of memory in a range of addresses, which must not be used afterwards."""
    first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return torch.frombuffer((ctypes.c_char * (end - first)).from_address(first), dtype=torch.uint8)
