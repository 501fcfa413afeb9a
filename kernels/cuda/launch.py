"""The common part of all launches: the check of tensors before a kernel reads them, the choice of the GPU.

Owns: the checks, the choice of the device. Does not know: kernels. Numbers inside tensors (pages, rows) are
not read: that would wait for the device.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes with which the kernels compute; sums are always float32."""
MAX_HEAD_DIM = 256
"""The largest head dimension of the attention kernels."""
_compiled: dict[tuple[object, ...], Any] = {}
"""The compiled kernels by the kind of arguments for which they were compiled."""


def check_tensor(
    what: str, tensor: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], like: torch.Tensor
) -> None:
    """Check that `tensor` is contiguous, of this shape and dtypes, on the device of `like`.

    Raises ValueError, naming `what`.
    """
    if tensor.is_contiguous() and _is_alike(tensor, shape, dtypes, like):
        return
    check_rows(what, tensor, shape, dtypes, like)
    if not tensor.is_contiguous():
        raise ValueError(f"expected contiguous {what}, got strides {tensor.stride()} of {list(tensor.shape)}")


def check_rows(
    what: str, tensor: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], like: torch.Tensor
) -> None:
    """Check a tensor as `check_tensor` does, but allow gaps between items of the first dimension.

    Raises ValueError.
    """
    is_dense = tensor.shape[0] == 0 or tensor[0].is_contiguous()
    if is_dense and _is_alike(tensor, shape, dtypes, like):
        return
    if tensor.device != like.device:
        raise ValueError(f"expected {what} on {like.device}, got {tensor.device}")
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"expected {what} as {names} {list(shape)}, "
        f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
    )


def _is_alike(
    tensor: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], like: torch.Tensor
) -> bool:
    """Return whether shape, dtype and device are as expected.

    The check must be cheap, as one prefill pass makes it hundreds of times.
    """
    return tensor.shape == tuple(shape) and tensor.dtype in dtypes and tensor.device == like.device


def check_pages(kv_layer: torch.Tensor) -> None:
    """Check that `kv_layer` is one layer of a KVCache. Raises ValueError.

    A layer is contiguous `[num_pages, num_kv_heads, 2, page_size, head_dim]` with an even head_dim.
    """
    is_pages = kv_layer.dim() == 5 and kv_layer.shape[2] == 2 and kv_layer.shape[4] % 2 == 0
    if not is_pages or not kv_layer.is_contiguous() or kv_layer.dtype not in FLOATS:
        raise ValueError(
            "expected contiguous pages [num_pages, num_kv_heads, 2, page_size, even head_dim], "
            f"got {kv_layer.dtype} {list(kv_layer.shape)} with strides {kv_layer.stride()}"
        )


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: object,
    num_warps: int,
    num_stages: int = 3,
    **constants: object,
) -> None:
    """Launch a kernel on the GPU of its first argument, a tensor, on that GPU's current stream.

    `constants` are the kernel's `constexpr` parameters, which come after all other parameters, in the
    kernel's order. Triton's own launch takes several times as long as most kernels run: each time it looks
    for the compiled kernel by all parameters. Here the search is done once for each kind of arguments.
    """
    tensor = arguments[0]
    assert isinstance(tensor, torch.Tensor)
    key = (kernel.fn, tensor.device, num_warps, num_stages, *constants.values(), *map(_kind, arguments))
    with _on_device_of(tensor):
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())
            return
        assert tuple(kernel.arg_names[len(arguments) :]) == tuple(constants), "in the kernel's order"
        compiled = kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


def _kind(argument: Any) -> object:
    """Return the properties of an argument by which Triton specialises a kernel.

    These are dtype and alignment of a tensor; of a number, whether it is 1, divisible by 16, longer than 32
    bits. Raises TypeError for anything else.
    """
    match argument:
        case bool():  # refused: True would have the kind of 1, for which Triton compiles another kernel
            pass
        case torch.Tensor():
            return argument.dtype, argument.data_ptr() % 16 == 0
        case int():
            return argument == 1, argument % 16 == 0, argument.bit_length() // 32
        case float():
            return float
        case _ if hasattr(argument, "block_shape"):  # a descriptor of a tensor, from which TMA copies
            return argument.base.dtype, *argument.block_shape
    raise TypeError(f"a kernel's argument is a tensor or a number, not {type(argument).__name__}")


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context whose launches go to the tensor's GPU, not to the thread's current GPU."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    device: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return device
