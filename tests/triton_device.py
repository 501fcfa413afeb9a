"""The device of the tests of GPU kernels: a GPU if there is one, else the CPU with Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"

_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
_NUMPY = tuple(map(int, np.__version__.split(".")[:2]))

runs_kernels = [
    pytest.mark.triton,
    pytest.mark.skipif(
        IS_INTERPRETED and _TRITON < (3, 8) and _NUMPY >= (2, 4),
        reason="the interpreter of Triton before 3.8 fails with numpy 2.4",
    ),
]

# The interpreter's products of bfloat16 are wrong, and it truncates to bfloat16; a GPU is tested with it.
DTYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The allowed errors of results of magnitude 1, by dtype."""
