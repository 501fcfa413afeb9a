"""The addresses of a sequence's keys, and the checks that the attention kernels share.

Owns: addresses within a layer's pages `[num_pages, num_kv_heads, 2, page_size, head_dim]`. Does not know:
softmax.
"""

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import MAX_HEAD_DIM, check_pages, check_rows, check_tensor
from kernels.cuda.spans import SPAN_FIELDS, Spans

LOG2_E = 1.4426950408889634
"""The factor log2(e) of the softmax, which uses powers of two: exp(x) = 2^(x * LOG2_E)."""
UNLIMITED_WINDOW = 2**30


@triton.jit
def key_offsets(
    pages, keys, start, is_key, kv_head,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return offsets (int64, in elements of a layer) of keys at positions `keys` = start + [0, BLOCK_KEYS).

    `pages` points to the sequence's first page number. The values lie PAGE_SIZE * HEAD_DIM elements after the
    keys.
    """
    if PAGE_SIZE % BLOCK_KEYS == 0:
        # All in one page: one number to load, and addresses that are known to be adjacent.
        page = tl.load(pages + start // PAGE_SIZE)
    else:
        page = tl.load(pages + keys // PAGE_SIZE, mask=is_key, other=0)
    head = (page * NUM_KV_HEADS + kv_head) * (2 * PAGE_SIZE * HEAD_DIM)
    return head + (keys % PAGE_SIZE) * HEAD_DIM


def block_dim(head_dim: int) -> int:
    """Return the power of two, at least 16, to which kernels pad heads of `head_dim`; padding is masked."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def check_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    spans: Spans,
    sliding_window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Check that the tensors fit together as the attention kernels' docstrings demand. Raises ValueError."""
    check_pages(kv_layer)
    _, num_kv_heads, _, _, head_dim = kv_layer.shape
    if query.dim() != 3 or query.shape[1] % num_kv_heads or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"expected queries [T, heads that {num_kv_heads} KV heads divide, head_dim of at most "
            f"{MAX_HEAD_DIM}], got {list(query.shape)} for pages {list(kv_layer.shape)}"
        )
    num_tokens, num_heads, _ = query.shape
    check_rows("queries", query, (num_tokens, num_heads, head_dim), [kv_layer.dtype], kv_layer)
    check_tensor("the result", out, query.shape, [kv_layer.dtype], kv_layer)
    check_tensor("spans", spans.table, (len(spans), SPAN_FIELDS), [torch.int64], kv_layer)
    check_tensor("page tables", spans.pages, (len(spans.pages),), [torch.int64], kv_layer)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a query sees itself at least, got a sliding window of {sliding_window}")
    if lse is not None:
        check_tensor("lse", lse, (num_tokens, num_heads), [torch.float32], kv_layer)
