"""The warm-up of a model on a GPU, which compiles its kernels.

Owns: the passes of the warm-up. Does not know: the kernels.
"""

from collections.abc import Callable

import torch

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel

_SHORT_LENS = (2, 32, 64)
"""Lengths of short passes in tokens, one for each kernel that such passes use (`skinny_linear`)."""


def warm_up(
    model: DecoderModel,
    kv: DeviceKVCache,
    *,
    chunk_len: int = 2,
    max_batch: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compute chunks of up to `chunk_len` tokens, and a decode step of each size up to `max_batch`.

    Later no request waits for the compilation of kernels, the capture of a graph, or the memory of a first
    large pass.

    A whole model captures its graphs, a stage computes its layers. Blocks for seconds. Before each pass,
    `on_progress` gets the numbers of computed passes and of all passes. The pages are freed again. Raises
    torch.OutOfMemoryError.
    """
    is_whole = model.is_first_stage and model.is_last_stage
    num_tokens = min(chunk_len, kv.pages.num_free * kv.page_size, model.spec.max_position)
    pages = kv.pages.allocate(-(-num_tokens // kv.page_size))
    lens = [num_tokens, *(short for short in _SHORT_LENS if short < num_tokens)]
    batches = [[Chunk([0] * length, 0, pages)] for length in lens]
    # The largest batch goes first, because graphs share the memory of their results. All batches write the
    # same token to one page. Batches of one and of two rows are always computed, because one pass may end
    # several prompts, and the head has another kernel for several rows than for one.
    sizes = model.graph_sizes(max(2, max_batch)) if is_whole else [1, 2]
    batches += [[Chunk([0], 0, pages[:1])] * size for size in reversed(sizes)]
    for done, chunks in enumerate(batches):
        on_progress(done, len(batches))
        batch = Batch.build(chunks, kv)
        if is_whole:
            model.forward(batch, kv)
        else:
            _compute_stage(model, batch, kv)
    index = torch.tensor(pages[:1], dtype=torch.int64, device=kv.device)
    kv.scatter(kv.layers.start, index, kv.gather(kv.layers.start, index))
    kv.pages.free(pages)


def _compute_stage(model: DecoderModel, batch: Batch, kv: DeviceKVCache) -> None:
    if model.is_first_stage:
        hidden = model.embed(batch)
    else:
        hidden = torch.zeros(batch.num_tokens, model.spec.hidden_size, dtype=model.dtype, device=model.device)
    for layer in model.layers:
        hidden = model.forward_layer(layer, hidden, batch, kv)
    if model.is_last_stage:
        model.logits(hidden[batch.last_rows])
