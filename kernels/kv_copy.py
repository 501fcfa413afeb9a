"""Copies between tokens, device pages and blocks.

A layer of the device's KVCache is `[num_pages, num_kv_heads, 2, page_size, head_dim]` (index 0 is K,
1 is V), so one page is byte for byte one layer of a KVCache block.

On CUDA, whole pages are copied by `kernels.cuda.page_copy`; everything else is torch.

Owns: the copies. Does not know: which page belongs to whom.
"""

import torch

from kernels.cuda import why_unavailable


def write_kv(
    kv_layer: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_of_token: torch.Tensor,
    offset_of_token: torch.Tensor,
) -> None:
    """Write new tokens into their pages: `kv_layer[page, :, 0, offset] = keys`, `[..., 1, ...] = values`.

    `keys`, `values`: `[T, num_kv_heads, head_dim]`; `page_of_token`, `offset_of_token`: int64 `[T]`, no slot
    twice. `2 * T * num_kv_heads * head_dim` elements are read, and as many written.
    """
    kv_layer[page_of_token, :, 0, offset_of_token] = keys
    kv_layer[page_of_token, :, 1, offset_of_token] = values


def gather_pages(kv_layer: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return copies of pages, `kv_layer[pages]`: contiguous `[n, num_kv_heads, 2, page_size, head_dim]`.

    `pages`: int64 `[n]`. n pages are read, and n pages written.
    """
    if _has_kernels(kv_layer):
        from kernels.cuda import page_copy

        return page_copy.gather_pages(kv_layer, pages)
    return kv_layer.index_select(0, pages)


def scatter_pages(kv_layer: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy `blocks` [n, num_kv_heads, 2, page_size, head_dim] into `pages` (int64 [n], no page twice).

    n pages are read, and n pages written.
    """
    if _has_kernels(kv_layer):
        from kernels.cuda import page_copy

        page_copy.scatter_pages(kv_layer, pages, blocks)
    else:
        kv_layer.index_copy_(0, pages, blocks)


def _has_kernels(kv_layer: torch.Tensor) -> bool:
    return kv_layer.is_cuda and not why_unavailable()
