"""Causal grouped-query attention over a paged KVCache on the CPU (attention.h).

Reference: `kernels.attention`, with the same semantics. Bytes moved: pages are read where they lie. In
prefill, a page is read once for every TILES tiles of queries that see the page (a tile has COLUMNS pairs of
query and head; attention_blocks.h); in decode, it is read once. Queries are read and results written once.
Scores never leave the processor's caches.

The result of a token does not depend on its batch, nor on how its sequence was cut into chunks, bit for bit.

Owns: the checks, and the description of a batch that the C++ code reads. Does not know: layers, requests.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.cpu.library import DTYPES, Library

HEAD_DIMS = (64, 96, 128)
_UNLIMITED_WINDOW = 2**30
_MOST_POSITIONS = 2**24
"""The most positions of a sequence.

Positions are compared as float32, which counts exactly up to this number.
"""


class _Batch(ctypes.Structure):
    """The C++ `struct Batch` of attention_blocks.h."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("first_pages", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("num_keys", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("num_sequences", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of a layer. `num_heads` is a multiple of `num_kv_heads`; `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    def last(self, num_kv_heads: int) -> "AttentionShape":
        """Return the shape of the last `num_kv_heads` KV heads, with their query heads."""
        return replace(
            self, num_heads=self.num_heads // self.num_kv_heads * num_kv_heads, num_kv_heads=num_kv_heads
        )

    def without(self, others: "AttentionShape") -> "AttentionShape":
        """Return the shape of the first heads, which remain without the last heads `others`."""
        return self.last(self.num_kv_heads - others.num_kv_heads)


class PagedAttention:
    """Attention in one forward pass over concatenated sequences, for all layers that share a sliding window.

    Sequence s has `query_lens[s] >= 1` new tokens, `kv_lens[s]` tokens in all (new tokens included); token t
    lies in page `page_tables[s][t // page_size]`. `kv_shape` is the shape of a layer's pages, `[num_pages,
    num_kv_heads, 2, page_size, head_dim]`. With `num_keys` the pages have only the first `num_keys[s]` tokens
    of sequence s, and queries attend only to these tokens. A query that sees none of them gets zeros, and a
    denominator of zero. Raises ValueError if lengths, page tables and shape do not fit together.
    """

    def __init__(
        self,
        library: Library,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_tables: Sequence[np.ndarray],
        kv_shape: Sequence[int],
        heads: AttentionShape,
        sliding_window: int | None = None,
        num_keys: Sequence[int] | None = None,
    ) -> None:
        self.kv_shape = tuple(kv_shape)
        num_keys = kv_lens if num_keys is None else num_keys
        self.heads = heads
        self.num_tokens = sum(query_lens)
        num_pages, num_kv_heads, _, page_size, head_dim = self.kv_shape
        if (num_kv_heads, head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(f"expected pages of {heads}, got pages of shape {list(kv_shape)}")
        if heads.num_heads % num_kv_heads or head_dim not in HEAD_DIMS:
            raise ValueError(f"expected heads that KV heads divide, of {HEAD_DIMS} dimensions, got {heads}")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"a query sees itself at least, got a sliding window of {sliding_window}")
        if not len(query_lens) == len(kv_lens) == len(page_tables) == len(num_keys):
            raise ValueError(
                f"expected as many lengths as page tables, "
                f"got {len(query_lens)}, {len(kv_lens)}, {len(num_keys)} and {len(page_tables)}"
            )
        used = [-(-num // page_size) for num in num_keys]
        for query_len, kv_len, num, table in zip(query_lens, kv_lens, num_keys, page_tables, strict=True):
            is_room = 1 <= num <= min(kv_len, len(table) * page_size)
            if not (1 <= query_len <= kv_len <= _MOST_POSITIONS and is_room):
                raise ValueError(
                    f"expected 1 <= new tokens <= all tokens, and room for {num} of them in the pages, "
                    f"got {query_len}, {kv_len} and {len(table)} pages of {page_size}"
                )
        pages = np.concatenate([table[:n] for table, n in zip(page_tables, used, strict=True)])
        if pages.min() < 0 or pages.max() >= num_pages:
            raise ValueError(f"expected pages in [0, {num_pages}), got {pages.min()} to {pages.max()}")
        # The C++ code reads these arrays by address: they live as long as this object.
        self._arrays = (
            pages.astype(np.int32),
            np.cumsum([0, *used[:-1]], dtype=np.int64),
            np.array(query_lens, dtype=np.int32),
            np.array(kv_lens, dtype=np.int32),
            np.array(num_keys, dtype=np.int32),
        )
        self._batch = _Batch(
            *(array.ctypes.data for array in self._arrays),
            num_pages,
            len(query_lens),
            heads.num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            min(sliding_window or _UNLIMITED_WINDOW, _UNLIMITED_WINDOW),
            heads.scale,
        )
        self.address = ctypes.addressof(self._batch)
        """Address of the description, for C++ code that reads it."""
        arguments = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)
        self._functions = {dtype: library.function("attention", dtype, *arguments) for dtype in DTYPES}

    def __call__(
        self, query: torch.Tensor, kv_layer: torch.Tensor, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of `query` [T, num_heads, head_dim] over the pages of one layer.

        The result is contiguous. The tokens of `query` may lie apart (as in a part of a larger matrix), the
        heads of a token may not. `kv_layer` holds the new tokens already. Both tensors are float32 or
        bfloat16 in the CPU's memory. `lse`, float32 [T, num_heads], takes the natural logarithm of each
        softmax's denominator. Raises ValueError for other tensors.
        """
        heads = self.heads
        shape = (self.num_tokens, heads.num_heads, heads.head_dim)
        is_query = query.shape == shape and query.stride()[1:] == (heads.head_dim, 1)
        if not is_query or kv_layer.shape != self.kv_shape or not kv_layer.is_contiguous():
            raise ValueError(
                f"expected queries {list(shape)} and pages {list(self.kv_shape)}, got {list(query.shape)} "
                f"with strides {query.stride()} and {list(kv_layer.shape)} with strides {kv_layer.stride()}"
            )
        function = self._functions.get(query.dtype)
        if function is None or kv_layer.dtype != query.dtype or not (query.is_cpu and kv_layer.is_cpu):
            raise ValueError(
                f"expected queries and pages of one type on the CPU, bfloat16 or float32, got {query.dtype} "
                f"on {query.device} and {kv_layer.dtype} on {kv_layer.device}"
            )
        if lse is not None and not (
            lse.shape == shape[:2] and lse.dtype is torch.float32 and lse.is_contiguous()
        ):
            raise ValueError(f"expected float32 {list(shape[:2])} for lse, got {lse.dtype} {list(lse.shape)}")
        out = torch.empty(shape, dtype=query.dtype)
        function(
            query.data_ptr(),
            query.stride(0),
            kv_layer.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            self.address,
        )
        return out
