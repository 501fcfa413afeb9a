"""Copies of one layer between device pages and transfer buffers, which have blocks one after the other.

A page is byte for byte one layer of a block, so the kernels copy words and know no shapes.

References: `index_select` and `index_copy_`. Bytes moved: n pages read and written.

Owns: the kernels, their launch. Does not know: whose blocks they are, where the buffer goes.
"""

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import check_pages, check_rows, check_tensor, launch

_BLOCK_WORDS = 4096
"""The number of 32-bit words that a program copies: 16 KiB."""


@triton.jit
def _copy_pages(
    pages, kv_layer, buffer, block_words, page_words,
    IS_GATHER: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Copy a part of one page, out of the layer (gather) or into it."""
    item = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    is_word = word < page_words
    in_layer = kv_layer + tl.load(pages + item) * page_words + word
    in_buffer = buffer + item * block_words + word
    if IS_GATHER:
        tl.store(in_buffer, tl.load(in_layer, mask=is_word), mask=is_word)
    else:
        tl.store(in_layer, tl.load(in_buffer, mask=is_word), mask=is_word)


def gather_pages(
    kv_layer: torch.Tensor, pages: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return copies of pages, `kv_layer[pages]`, written into `out` if it is given.

    The result is `[n, num_kv_heads, 2, page_size, head_dim]`. `kv_layer`: contiguous pages of one layer;
    `pages`: int64 `[n]` on its device. Items of `out` may lie apart (one layer of a buffer of whole blocks).
    Raises ValueError for other tensors; page numbers are not checked.
    """
    if out is None:
        out = torch.empty((len(pages), *kv_layer.shape[1:]), dtype=kv_layer.dtype, device=kv_layer.device)
    _launch(kv_layer, pages, out, is_gather=True)
    return out


def scatter_pages(kv_layer: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy `blocks` [n, num_kv_heads, 2, page_size, head_dim] into `pages` (int64 `[n]`, no page twice).

    `blocks` has the dtype of `kv_layer`; its items may lie apart. Raises ValueError for other tensors; page
    numbers are not checked.
    """
    _launch(kv_layer, pages, blocks, is_gather=False)


def _launch(kv_layer: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor, *, is_gather: bool) -> None:
    check_pages(kv_layer)
    check_tensor("page numbers", pages, (len(pages),), [torch.int64], kv_layer)
    check_rows("blocks", buffer, (len(pages), *kv_layer.shape[1:]), [kv_layer.dtype], kv_layer)
    if len(pages) == 0:
        return
    layer_words, buffer_words = kv_layer.view(torch.int32), buffer.view(torch.int32)
    page_words = layer_words.stride(0)
    launch(
        _copy_pages, (len(pages), triton.cdiv(page_words, _BLOCK_WORDS)),
        pages, layer_words, buffer_words, buffer_words.stride(0), page_words,
        IS_GATHER=is_gather, BLOCK_WORDS=_BLOCK_WORDS, num_warps=4,
    )  # fmt: skip
