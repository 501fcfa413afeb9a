"""Memory in huge pages."""

import torch

from kernels.cpu.memory import HugeMemory, huge_zeros


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
