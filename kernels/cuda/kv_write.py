"""Norm, rotation and page write of queries, keys and values before attention, in one pass over memory.

Some models (Qwen3) have a norm of each query and key. Bytes moved: every query, key and value read once and
written once; `bytes_moved`.

Owns: the reference, the kernel, its launch. Does not know: layers, the owners of pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import check_pages, check_tensor, launch
from kernels.head_norms import HeadNorms

_BLOCK_HEADS = 16
"""The number of heads of one token that a program handles."""


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """The token slots of T tokens, on the GPU.

    `cos`, `sin`: float32 `[T, head_dim / 2]`. `pages`, `offsets`: int64 `[T]`, without a repeated slot. A
    token whose page is -1 is rotated but not written.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor


def bytes_moved(num_tokens: int, num_rows: int, head_dim: int, item_bytes: int) -> int:
    """Return the bytes moved for `num_rows` heads a token, without the angles.

    `num_rows`: query heads + 2 * KV heads.
    """
    return 2 * num_tokens * num_rows * head_dim * item_bytes


def rotate_and_write_reference(
    qkv: torch.Tensor, kv_layer: torch.Tensor, slots: TokenSlots, norms: HeadNorms | None = None
) -> None:
    """Compute `rotate_and_write` in torch and float32. Only the queries in `qkv` are defined afterwards."""
    num_kv_heads = kv_layer.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    heads = qkv[:, : num_heads + num_kv_heads].float()
    if norms is not None:
        heads *= torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + norms.eps)
        heads[:, :num_heads] *= norms.query.float()
        heads[:, num_heads:] *= norms.key.float()
    first, second = heads.chunk(2, dim=-1)
    cos, sin = slots.cos[:, None], slots.sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    qkv[:, :num_heads] = rotated[:, :num_heads]
    written = slots.pages >= 0
    pages, offsets = slots.pages[written], slots.offsets[written]
    kv_layer[pages, :, 0, offsets] = rotated[written, num_heads:]
    kv_layer[pages, :, 1, offsets] = qkv[written, num_heads + num_kv_heads :]


@triton.jit
def _rotate_and_write(
    qkv, kv_layer, cos, sin, pages, offsets, query_norm, key_norm, eps,
    HAS_NORMS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Norm (if HAS_NORMS), rotate and store up to BLOCK_HEADS heads of one token; values are only stored.

    Queries are stored in place, keys and values in the token's page; nothing is written to page -1.

    The rotated pairs are elements (i, i + HEAD_DIM / 2), so a head is two vectors of half its size.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROWS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_dim = dim < HALF
    is_element = (head < NUM_ROWS)[:, None] & is_dim[None, :]
    at = (token * NUM_ROWS + head)[:, None] * HEAD_DIM + dim[None, :]
    as_read_1 = tl.load(qkv + at, mask=is_element, other=0.0)
    as_read_2 = tl.load(qkv + at + HALF, mask=is_element, other=0.0)
    first, second = as_read_1.to(tl.float32), as_read_2.to(tl.float32)
    if HAS_NORMS:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        query_1 = tl.load(query_norm + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        query_2 = tl.load(query_norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        key_1 = tl.load(key_norm + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        key_2 = tl.load(key_norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        first *= factor * tl.where(is_query[:, None], query_1, key_1)
        second *= factor * tl.where(is_query[:, None], query_2, key_2)
    cosine = tl.load(cos + token * HALF + dim, mask=is_dim, other=0.0)[None, :]
    sine = tl.load(sin + token * HALF + dim, mask=is_dim, other=0.0)[None, :]
    rotated_1 = (first * cosine - second * sine).to(as_read_1.dtype)
    rotated_2 = (second * cosine + first * sine).to(as_read_1.dtype)

    tl.store(qkv + at, rotated_1, mask=is_element & is_query[:, None])
    tl.store(qkv + at + HALF, rotated_2, mask=is_element & is_query[:, None])
    page, offset = tl.load(pages + token), tl.load(offsets + token)
    is_written = is_element & (~is_query)[:, None] & (page >= 0)
    k_or_v = tl.where(is_value, 1, 0)
    kv_head = head - NUM_HEADS - k_or_v * NUM_KV_HEADS
    slot = ((page * NUM_KV_HEADS + kv_head) * 2 + k_or_v) * PAGE_SIZE + offset
    to = slot[:, None] * HEAD_DIM + dim[None, :]
    tl.store(kv_layer + to, tl.where(is_value[:, None], as_read_1, rotated_1), mask=is_written)
    tl.store(kv_layer + to + HALF, tl.where(is_value[:, None], as_read_2, rotated_2), mask=is_written)


def rotate_and_write(
    qkv: torch.Tensor, kv_layer: torch.Tensor, slots: TokenSlots, norms: HeadNorms | None = None
) -> None:
    """Rotate the queries in place, and write the rotated keys, and the values, to their pages.

    `qkv`: contiguous `[T, num_heads + 2 * num_kv_heads, head_dim]`, queries, keys, values, in the pages'
    dtype. `kv_layer`: contiguous `[num_pages, num_kv_heads, 2, page_size, head_dim]` of float32, bfloat16 or
    float16. `norms` come before the rotation; None if the model has none. Arithmetic is float32, rounded
    once. Raises ValueError for other tensors; slots are not checked.
    """
    check_pages(kv_layer)
    _, num_kv_heads, _, page_size, head_dim = kv_layer.shape
    num_tokens, num_rows, _ = qkv.shape
    check_tensor(
        "queries, keys and values", qkv, (num_tokens, num_rows, head_dim), [kv_layer.dtype], kv_layer
    )
    if num_rows <= 2 * num_kv_heads:
        raise ValueError(f"expected more than {2 * num_kv_heads} heads, got {list(qkv.shape)}")
    for name, angles in (("cos", slots.cos), ("sin", slots.sin)):
        check_tensor(name, angles, (num_tokens, head_dim // 2), [torch.float32], kv_layer)
    for name, places in (("page numbers", slots.pages), ("offsets", slots.offsets)):
        check_tensor(name, places, (num_tokens,), [torch.int64], kv_layer)
    if norms is not None:
        check_tensor("query norm", norms.query, (head_dim,), [qkv.dtype], kv_layer)
        check_tensor("key norm", norms.key, (head_dim,), [qkv.dtype], kv_layer)
    if num_tokens == 0:
        return
    launch(
        _rotate_and_write, (num_tokens, triton.cdiv(num_rows, _BLOCK_HEADS)),
        qkv, kv_layer, slots.cos, slots.sin, slots.pages, slots.offsets,
        qkv if norms is None else norms.query, qkv if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        HAS_NORMS=norms is not None, NUM_HEADS=num_rows - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), PAGE_SIZE=page_size,
        BLOCK_HEADS=_BLOCK_HEADS, num_warps=4,
    )  # fmt: skip
