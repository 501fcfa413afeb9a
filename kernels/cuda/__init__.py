"""The GPU's kernels, in Triton. `why_unavailable` works without Triton; the other modules need it.

Wrappers launch on the device of their tensors, on its current stream.

With TRITON_INTERPRET=1, set before the modules are imported, kernels run on CPU tensors: slowly, and without
a GPU.
"""

from functools import cache
from importlib.util import find_spec


@cache
def why_unavailable() -> str:
    """Return the reason why these kernels cannot run in this Python; empty if they can."""
    return (
        "" if find_spec("triton") else "triton is not installed (.venv/bin/pip install --editable '.[cuda]')"
    )
