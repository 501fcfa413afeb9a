"""The warm-up of a model on a GPU, which compiles its kernels.

Owns: the passes of the warm-up. Does not know: the kernels.
"""

import torch

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel


def warm_up(model: DecoderModel, kv: DeviceKVCache) -> None:
    """Compute one prompt and one step, so that no request waits for the compilation of kernels.

    A whole model captures its first graph, a stage computes its layers. Blocks for seconds. The pages are
    freed again.
    """
    pages = kv.allocate(1)
    for chunk in (Chunk([0, 0], 0, pages), Chunk([0], 2, pages)):
        batch = Batch.build([chunk], kv)
        if model.is_first_stage and model.is_last_stage:
            model.forward(batch, kv)
        else:
            _compute_stage(model, batch, kv)
    kv.free(pages)


def _compute_stage(model: DecoderModel, batch: Batch, kv: DeviceKVCache) -> None:
    if model.is_first_stage:
        hidden = model.embed(batch)
    else:
        hidden = torch.zeros(batch.num_tokens, model.spec.hidden_size, dtype=model.dtype, device=model.device)
    for layer in model.layers:
        hidden = model.forward_layer(layer, hidden, batch, kv)
    if model.is_last_stage:
        model.logits(hidden[batch.last_rows])
