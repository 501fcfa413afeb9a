"""Decode steps as CUDA graphs: one launch a step instead of hundreds.

Hundreds of launches would take longer than the computation of a step.

There is a graph for each size in `BUCKETS`, captured with the first batch that needs it, usually in the
warm-up. A graph reads its inputs from its own memory; the logits of all graphs are in one memory. A batch is
padded to the next size with empty sequences, which read and write no page.

Owns: the graphs, their inputs. Does not know: how a layer is computed, sampling.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from kernels.cuda.kv_write import TokenSlots
from kernels.cuda.spans import SPAN_FIELDS, Spans
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.layers.gpu import LayerInputs, TritonLayers
from workers.engine.rotary import cos_sin

BUCKETS = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))
"""The batch sizes for which there are graphs, ascending."""
_TOKEN_FIELDS = 4
"""The number of fields of a token: id, position, page, offset."""
_PADDING = ((0,), (0,), (-1,), (0,))
"""The fields of a padding token, which is not written."""


class Captured(NamedTuple):
    """A captured computation that `replay` repeats on the current stream, over the same memory."""

    output: torch.Tensor
    replay: Callable[[], None]


class Capture(Protocol):
    """A function that runs a computation at least once, captures it, and returns the capture."""

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured: ...


class CudaCapture:
    """The capture into CUDA graphs. The graphs share one memory pool, because no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured:
        with torch.cuda.device(self._device):
            return self._capture(compute)

    def _capture(self, compute: Callable[[], torch.Tensor]) -> Captured:
        # The first run compiles kernels and allocates workspaces, which a capture must not.
        current, warm_up = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            compute()
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KVCache meanwhile. The capture concerns only the calls of this thread.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return Captured(output, graph.replay)


class DecodeGraphs:
    """The decode graphs of a whole model over the pages of `kv`, for use by one thread."""

    def __init__(self, layers: TritonLayers, kv: DeviceKVCache, capture: Capture) -> None:
        self.kv = kv
        self._layers, self._capture = layers, capture
        self._graphs: dict[int, _Graph] = {}
        self._logits: torch.Tensor | None = None

    def can_compute(self, batch: Batch) -> bool:
        """Return whether the graphs can compute a batch.

        Each chunk must be a single token, with at most as many chunks as the largest bucket has. All page
        tables together must have at most as many entries as the cache has pages.
        """
        is_decode = batch.num_tokens == len(batch.query_lens) <= BUCKETS[-1]
        return is_decode and len(batch.pages) <= self.kv.pages.num_pages

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return float32 logits `[S, vocab_size]`, valid until the next call.

        `can_compute` must have returned True.
        """
        bucket = next(size for size in BUCKETS if size >= batch.num_tokens)
        if bucket not in self._graphs:
            if self._logits is None or len(self._logits) < bucket:
                self._logits = torch.empty(bucket, self.kv.spec.vocab_size, device=self.kv.device)
            self._graphs[bucket] = _Graph(bucket, self._layers, self.kv, self._logits[:bucket])
        return self._graphs[bucket].forward(batch, self._capture)


class _Graph:
    """The graph of a batch of `size` sequences, with as many page-table entries as the cache has pages.

    Inputs are tokens, spans and page tables, one after the other. The host writes them to views of `_staged`.
    """

    def __init__(self, size: int, layers: TritonLayers, kv: DeviceKVCache, logits: torch.Tensor) -> None:
        self._size, self._layers, self._kv, self._logits = size, layers, kv, logits
        # An even number: Triton would compile kernels anew for page tables not aligned to 16 bytes.
        self._num_fixed = -(-size * (_TOKEN_FIELDS + SPAN_FIELDS) // 2) * 2
        num_inputs = self._num_fixed + kv.pages.num_pages
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=kv.device)
        self._staged = torch.zeros(num_inputs, dtype=torch.int64, pin_memory=kv.device.type == "cuda")
        self._tokens, self._spans, self._pages = (part.numpy() for part in self._parts(self._staged))
        self._spans[:, 0] = range(size)
        self._copied = torch.cuda.Event() if kv.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._captured: Captured | None = None

    def forward(self, batch: Batch, capture: Capture) -> torch.Tensor:
        self._fill(batch)
        if self._captured is None:
            self._captured = capture(self._compute)
        self._captured.replay()
        return self._captured.output[: batch.num_tokens]

    def _compute(self) -> torch.Tensor:
        size, kv = self._size, self._kv
        tokens, spans, pages = self._parts(self._inputs)
        token_ids, positions, page_of_token, offset_of_token = tokens
        angles = cos_sin(kv.spec, positions)
        nobody = Spans(spans[:0], pages)
        inputs = LayerInputs(
            TokenSlots(*angles, page_of_token, offset_of_token),
            Spans(spans, pages),
            nobody,
            self._layers.num_splits(size),
        )
        hidden = self._layers.embed(token_ids)
        for layer in kv.layers:
            hidden = self._layers.compute_layer(layer, hidden, inputs, kv)
        return self._logits.copy_(self._layers.head(hidden))

    def _fill(self, batch: Batch) -> None:
        """Copy the batch's inputs to the graph's memory, in one copy from pinned memory."""
        num, num_pages = batch.num_tokens, len(batch.pages)
        if self._copied is not None:
            self._copied.synchronize()  # until the previous copy from this memory has run
        self._tokens[:, :num] = batch.host[:_TOKEN_FIELDS]
        self._tokens[:, num:] = _PADDING
        spans = self._spans[:num]
        spans[:, 1], spans[:, 2], spans[:, 3] = 1, batch.host.positions, batch.first_pages
        spans[:, 4] = self._layers.part_keys(batch.host.positions + 1)
        self._spans[num:, 1:] = 0
        self._pages[:num_pages] = batch.pages
        num_used = self._num_fixed + num_pages
        self._inputs[:num_used].copy_(self._staged[:num_used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of `inputs`: tokens `[_TOKEN_FIELDS, size]`, spans `[size, SPAN_FIELDS]`, pages."""
        num_token, num_span = self._size * _TOKEN_FIELDS, self._size * SPAN_FIELDS
        tokens, spans, pages = inputs.tensor_split([num_token, self._num_fixed])
        return tokens.view(_TOKEN_FIELDS, -1), spans[:num_span].view(-1, SPAN_FIELDS), pages
