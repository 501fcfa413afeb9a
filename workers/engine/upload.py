"""The upload of small arrays to the device: one asynchronous copy for all of them.

Owns: the copy. Does not know: the meaning of the numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 2
"""The alignment in int64 numbers: Triton compiles kernels anew for pointers not aligned to 16 bytes."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return int64 arrays as tensors on `device`; on the CPU they share the arrays' memory.

    On CUDA they are parts of one tensor, filled from pinned memory on the current stream.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = np.cumsum([0, *(-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    staged = torch.empty(begins[-1], dtype=torch.int64, pin_memory=True)
    for begin, array in zip(begins, arrays, strict=False):
        staged.numpy()[begin : begin + array.size] = array.ravel()
    # The allocator keeps the pinned memory until the copy has run.
    whole = staged.to(device, non_blocking=True)
    return [
        whole[begin : begin + array.size].view(array.shape)
        for begin, array in zip(begins, arrays, strict=False)
    ]
