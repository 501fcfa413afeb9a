"""Pages quantised to half the bytes for a transfer: int8 or fp8 (e4m3), with a scale for each head's K and V.

A stored number is the element divided by its scale, rounded to nearest, ties to even; the scale maps the
largest magnitude of one page's K (or V) of one head in one layer to the largest number of the encoding. The
error of a finite element x with this `scale` is at most

    int8: scale / 2                    (scale = max / 127: 0.4% of the largest magnitude)
    e4m3: max(|x| / 16, scale / 1024)  (3 bits of mantissa; the least normal number is scale / 64)

plus the rounding of the result to its dtype. e4m3 is made and read with integer arithmetic: GPUs before Ada
have no instructions for it.

Bytes moved: `bytes_moved`. Quantising reads its pages twice, the second time from the L2 cache.

Owns: the references, the kernels, their launch. Does not know: layouts of messages, who asks.
"""

from enum import Enum

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import check_pages, check_tensor, launch

_BLOCK = 2048
_LEAST_SCALE = 1e-30
"""The least scale, for parts that are all zeros; far below the values of a model."""
_ROUNDER = 12582912.0
"""1.5 * 2^23, which rounds a small float32 to an integer when added and subtracted again."""
_REBIAS = 2.0**120
"""2^(127 - 7): the exponent bias is 127 in float32, and 7 in e4m3.

The kernels copy exponent and mantissa bits of an e4m3 number into a float32. This float32 times the factor
is the number, also for subnormal numbers.
"""


class Encoding(Enum):
    """The encoding of stored elements; the value is the largest magnitude that can be stored."""

    INT8 = 127.0
    E4M3 = 448.0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored numbers, one byte each."""
        return torch.int8 if self is Encoding.INT8 else torch.float8_e4m3fn


def bytes_moved(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, item_bytes: int) -> int:
    """Return the bytes that quantising moves. Dequantising moves as many.

    They are the elements, their one-byte numbers, and a float32 scale for each head's K and V.
    """
    return num_pages * num_kv_heads * 2 * (page_size * head_dim * (item_bytes + 1) + 4)


def quantise_reference(
    kv_layer: torch.Tensor, pages: torch.Tensor, encoding: Encoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `quantise_pages`, computed in torch."""
    wide = kv_layer[pages].float()
    scales = wide.abs().amax((-2, -1)).div(encoding.value).clamp(min=_LEAST_SCALE)
    numbers = wide / scales[..., None, None]
    return (numbers.round() if encoding is Encoding.INT8 else numbers).to(encoding.dtype), scales


def dequantise_reference(
    kv_layer: torch.Tensor, pages: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the result of `dequantise_pages`, computed in torch."""
    kv_layer[pages] = (numbers.float() * scales[..., None, None]).to(kv_layer.dtype)


@triton.jit
def _to_e4m3(x, REBIAS: tl.constexpr):
    """Return the e4m3 byte of float32 `x`, |x| <= 448: exponent rebiased, mantissa rounded to 3 bits."""
    bits = (x * (1.0 / REBIAS)).to(tl.int32, bitcast=True)  # exact, which a division need not be
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(byte, REBIAS: tl.constexpr):
    """Return the float32 value of an e4m3 byte that is not NaN."""
    bits = byte.to(tl.int32)
    return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * REBIAS


@triton.jit
def _quantise(
    pages, kv_layer, numbers, scales, part_size, largest, least_scale,
    IS_INT8: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDER: tl.constexpr, REBIAS: tl.constexpr,
):  # fmt: skip
    """Quantise K or V of one head of one page: first find the largest magnitude, then write the numbers."""
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = kv_layer + (tl.load(pages + item) * PARTS + part) * part_size
    magnitudes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, part_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(source + at, mask=at < part_size, other=0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, tl.abs(values))
    scale = tl.maximum(tl.max(magnitudes, 0) / largest, least_scale)
    tl.store(scales + item * PARTS + part, scale)
    target = numbers + (item * PARTS + part) * part_size
    for start in range(0, part_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        scaled = tl.load(source + at, mask=at < part_size, other=0.0).to(tl.float32) / scale
        # A quotient may exceed the largest number by its own rounding.
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        if IS_INT8:
            tl.store(target + at, ((scaled + ROUNDER) - ROUNDER).to(tl.int8), mask=at < part_size)
        else:
            tl.store(target + at, _to_e4m3(scaled, REBIAS), mask=at < part_size)


@triton.jit
def _dequantise(
    pages, kv_layer, numbers, scales, part_size,
    IS_INT8: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, REBIAS: tl.constexpr,
):  # fmt: skip
    """Dequantise a piece of K or V of one head of one page."""
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = numbers + (item * PARTS + part) * part_size
    stored = tl.load(source + at, mask=at < part_size, other=0)
    values = stored.to(tl.float32) if IS_INT8 else _from_e4m3(stored, REBIAS)
    values *= tl.load(scales + item * PARTS + part)
    target = kv_layer + (tl.load(pages + item) * PARTS + part) * part_size
    tl.store(target + at, values.to(kv_layer.dtype.element_ty), mask=at < part_size)


def quantise_pages(
    kv_layer: torch.Tensor, pages: torch.Tensor, encoding: Encoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers `[n, num_kv_heads, 2, page_size, head_dim]` in `encoding.dtype`, and their scales.

    Scales are float32 `[n, num_kv_heads, 2]`. `kv_layer`: contiguous pages of one layer, whose elements are
    all finite, also unused elements; `pages`: int64 `[n]` on its device. Raises ValueError for other tensors;
    page numbers are not checked.
    """
    check_pages(kv_layer)
    check_tensor("page numbers", pages, (len(pages),), [torch.int64], kv_layer)
    _, num_kv_heads, _, page_size, head_dim = kv_layer.shape
    shape = (len(pages), *kv_layer.shape[1:])
    numbers = torch.empty(shape, dtype=encoding.dtype, device=kv_layer.device)
    scales = torch.empty(shape[:3], dtype=torch.float32, device=kv_layer.device)
    if len(pages):
        launch(
            _quantise, (len(pages), 2 * num_kv_heads),
            pages, kv_layer, _bytes(numbers), scales, page_size * head_dim, encoding.value, _LEAST_SCALE,
            IS_INT8=encoding is Encoding.INT8, PARTS=2 * num_kv_heads, BLOCK=_BLOCK,
            ROUNDER=_ROUNDER, REBIAS=_REBIAS, num_warps=4,
        )  # fmt: skip
    return numbers, scales


def dequantise_pages(
    kv_layer: torch.Tensor, pages: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the values of `quantise_pages`' result into `pages` (int64 `[n]`, no page twice) of one layer.

    Raises ValueError for other tensors; page numbers are not checked.
    """
    check_pages(kv_layer)
    check_tensor("page numbers", pages, (len(pages),), [torch.int64], kv_layer)
    _, num_kv_heads, _, page_size, head_dim = kv_layer.shape
    shape = (len(pages), *kv_layer.shape[1:])
    check_tensor("numbers", numbers, shape, [encoding.dtype for encoding in Encoding], kv_layer)
    check_tensor("scales", scales, shape[:3], [torch.float32], kv_layer)
    if len(pages):
        part_size = page_size * head_dim
        launch(
            _dequantise, (len(pages), 2 * num_kv_heads, triton.cdiv(part_size, _BLOCK)),
            pages, kv_layer, _bytes(numbers), scales, part_size,
            IS_INT8=numbers.dtype is torch.int8, PARTS=2 * num_kv_heads, BLOCK=_BLOCK, REBIAS=_REBIAS,
            num_warps=4,
        )  # fmt: skip


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view of the numbers in the kernels' form: e4m3 as uint8."""
    return numbers if numbers.dtype is torch.int8 else numbers.view(torch.uint8)
