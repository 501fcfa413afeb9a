"""The order of elements in an engine's pages, measured with the engine's own attention backend.

The backend writes numbers instead of keys and values, and the page shows where each number went. This finds
any fixed order, such as vectors transposed for the processor, or tokens before heads or after heads.

Owns: the measurement. Does not know: the use of the order. Loads torch and vLLM.
"""

from typing import Any

import numpy as np
import torch

from kvstore.connectors.vllm.worker.pages import Order
from mooncake.errors import ConfigError

_BASE = 128
"""Integers up to this number are exact in every dtype."""


def page_order(layer: Any, pages: torch.Tensor) -> Order:
    """Return the order `[kv_head, 2, token, head_dim]`: the offset of each element in a page of `pages`.

    Args:
        layer: vLLM's attention layer with its backend.
        pages: The layer's KVCache `[page, kv_head, token, 2 * head_dim]`; nothing is written to it.

    Raises ConfigError if a page is not just a reordering of keys and values, as with quantised KVCache.
    """
    _, num_heads, num_tokens, width = pages.shape
    shape = (num_heads, 2, num_tokens, width // 2)
    numbers = torch.arange(num_heads * num_tokens * width).reshape(shape)
    found = torch.zeros_like(numbers)
    scale = 1
    while scale < numbers.numel():
        found += scale * _written(layer, pages, numbers // scale % _BASE).reshape(shape)
        scale *= _BASE
    places = np.empty(numbers.numel(), np.int32)
    numbers_at = found.reshape(-1).numpy()
    if not np.array_equal(np.sort(numbers_at), np.arange(len(numbers_at))):
        raise ConfigError(
            f"{type(layer.impl).__name__} keeps keys and values otherwise than as they are; blocks of a pool"
            " cannot be made of its pages"
        )
    places[numbers_at] = np.arange(len(numbers_at), dtype=np.int32)
    return places.reshape(shape)


def _written(layer: Any, pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a page's content, in the order of memory, after `numbers` were written as keys and values."""
    page = torch.zeros_like(pages[:1])
    tokens_first = numbers.permute(1, 2, 0, 3).to(pages.dtype).contiguous()
    slots = torch.arange(pages.shape[2])
    layer.impl.do_kv_cache_update(layer, tokens_first[0], tokens_first[1], page, slots)
    return page.contiguous().reshape(-1).to(torch.int64)
