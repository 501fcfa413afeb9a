"""The layers of a tensor-parallel group: each rank computes its part of a layer, and the parts are summed.

Hidden states are the same on every rank, bit for bit, before and after every layer.

Owns: the sums and gathers over the ranks. Does not know: the arithmetic of a layer, how ranks meet.
"""

from typing import Protocol

import torch
from torch.nn.functional import pad

from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import TensorShard, vocab_of


class RankLayers(Protocol):
    """An implementation of layers over one rank's weights; `attention` and `mlp` leave out the residual."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows `[T, hidden_size]` of this rank's part of the embedding.

        `token_ids` [T] count from the first row of this part.
        """

    def attention(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor: ...

    def mlp(self, layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary for hidden states `[S, hidden_size]`."""


class ShardedLayers:
    """All layers, computed in parts: this rank computes its part and adds up the parts of the group.

    Implements `workers.engine.model.Layers`.
    """

    def __init__(self, parts: RankLayers, spec: ModelSpec, shard: TensorShard) -> None:
        self._parts, self._shard = parts, shard
        self._vocabs = [vocab_of(spec, rank, shard.size) for rank in range(shard.size)]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        vocab = self._vocabs[self._shard.rank]
        is_elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        rows = self._parts.embed((token_ids - vocab.start).masked_fill_(is_elsewhere, 0))
        rows.masked_fill_(is_elsewhere[:, None], 0.0)
        self._shard.all_reduce(rows)
        return rows

    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        # The residual is added after the sum: bfloat16 would round a part that includes it more coarsely.
        attended = self._parts.attention(layer, hidden, batch, kv)
        self._shard.all_reduce(attended)
        hidden = attended.add_(hidden)
        transformed = self._parts.mlp(layer, hidden, batch)
        self._shard.all_reduce(transformed)
        return transformed.add_(hidden)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        part = self._parts.logits(hidden_rows)
        width = len(self._vocabs[0])
        gathered = self._shard.all_gather(pad(part, (0, width - part.shape[1])))
        return torch.cat(
            [logits[:, : len(vocab)] for logits, vocab in zip(gathered, self._vocabs, strict=True)], 1
        )
