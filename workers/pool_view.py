"""The pool's segment as torch sees it: pages as tensors, without a copy.

Owns: the strides. Does not know: which pages hold what; the messenger does.
"""

from collections.abc import Sequence

import torch

from kvstore.segment import Segment
from mooncake.blocks import DTYPE_BYTES, KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PoolView:
    """All pages of a segment, `[num_pages, num_layers, num_kv_heads, 2, block_size, head_dim]`."""

    def __init__(self, segment: Segment, layout: KVLayout) -> None:
        item_bytes = DTYPE_BYTES[layout.dtype]
        flat = torch.frombuffer(segment.buffer, dtype=torch.uint8)[segment.page_offset(0) :]
        inner = (layout.num_layers, layout.num_kv_heads, 2, layout.block_size, layout.head_dim)
        strides = [segment.page_stride // item_bytes]
        for axis in range(len(inner)):
            size = 1
            for extent in inner[axis + 1 :]:
                size *= extent
            strides.append(size)
        typed = flat[: segment.num_pages * segment.page_stride].view(TORCH_DTYPES[layout.dtype])
        self._pages = typed.as_strided((segment.num_pages, *inner), strides)

    def read_layer(self, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """A copy of one layer of `pages`, `[n, num_kv_heads, 2, block_size, head_dim]`."""
        return self._pages[:, layer].index_select(0, torch.tensor(pages))
