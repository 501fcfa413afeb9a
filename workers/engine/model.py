"""A decoder-only transformer over a paged KVCache, computed layer by layer.

Token-for-token equality with transformers' eager models in float32 is the aim.

Models of adjacent ranges of layers form a pipeline (CPP, Mooncake section 5.1). Models that share a group
compute the same layers in parts (tensor parallelism). Callers that load or store KVCache between layers
(section 5.2) write the loop of `forward` themselves.

Owns: the forward pass of the layers `[a, b)` of one model, and which implementation of a layer computes. Does
not know: scheduling, transfers, sampling, how the ranks of a group meet.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn.functional import embedding

from kernels.cpu.attention import AttentionShape
from kernels.cpu.library import Library, choose
from workers.engine import cuda
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import HostedLayers
from workers.engine.layers.cpu import CpuLayers, unsupported
from workers.engine.layers.reference import TorchLayers
from workers.engine.layers.sharded import ShardedLayers
from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import TensorShard, part_of
from workers.engine.weights import Weights

if TYPE_CHECKING:  # these modules import Triton, which may be missing
    from workers.engine.decode_graphs import DecodeGraphs
    from workers.engine.layers.gpu import TritonLayers

log = logging.getLogger(__name__)


class Layers(Protocol):
    """An implementation of the layers, to which the methods of the same names in `DecoderModel` delegate.

    `embed` gets token ids, int64 `[T]`, and adds no learned positions.
    """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor: ...

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor: ...


class PassAtHelper(NamedTuple):
    """A pass that was sent to a helper. `number` is the pass's number, `hosted` the layers at the helper."""

    hosted: HostedLayers
    number: int

    def take(self) -> torch.Tensor:
        """Wait for the states `[T, hidden_size]` that leave the helper's layers. Raises HelperLost."""
        return self.hosted.owner.take(self.number)


class DecoderModel:
    """Layers `[layers.start, layers.stop)` of a model; nothing can be computed before weights are loaded.

    On the CPU and on CUDA the project's own kernels compute, if they can compute this model and
    `allow_native` is set; otherwise torch does. `computed_by` says which: "torch", "triton" or an instruction
    set. `fallback_reason` is the reason if torch computes, and is empty otherwise.

    With a `shard` this is one rank's part of these layers: it holds and writes the KV heads `kv_heads` only.
    Hidden states and logits are complete, and the same on every rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        shard: TensorShard | None = None,
        allow_native: bool = True,
    ) -> None:
        if not 0 <= layers.start < layers.stop <= spec.num_layers or layers.step != 1:
            raise ValueError(f"layers must be a non-empty part of [0, {spec.num_layers}), got {layers}")
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, torch.device(device)
        self.shard = shard
        self._part = part_of(spec) if shard is None else part_of(spec, shard.rank, shard.size)
        self._library, self.fallback_reason = self._choose(allow_native)
        self.computed_by = self._name()
        self.idle_cores: frozenset[int] = frozenset()
        """Cores on which the model computes while other processes leave them idle."""
        self.freed_layers = range(0)
        """The layers whose weights have been freed, so that they cannot be computed here."""
        self._computed: Layers | None = None
        self._positions: torch.Tensor | None = None
        self._triton: TritonLayers | None = None
        self._graphs: DecodeGraphs | None = None

    def _choose(self, allow_native: bool) -> tuple[Library | None, str]:
        if not allow_native:
            return None, "torch was asked for"
        if self.device.type != "cpu":
            reason = cuda.unsupported(self.spec, self.dtype)
            if self.shard is not None:
                reason = reason or "its own kernels do not compute one rank of a group"
            if reason:
                log.warning("torch computes this model, more slowly: %s", reason)
            return None, reason
        choice = choose()
        reason = unsupported(self.spec, self.dtype)
        if choice.library is not None and reason:
            log.warning("torch computes this model, at about half the speed: %s", reason)
            return None, reason
        return choice.library, choice.reason

    def _name(self) -> str:
        if self._library is not None:
            return self._library.isa.value
        return "torch" if self.fallback_reason else "triton"

    def use_idle_cores(self, num_threads: int) -> bool:
        """Set the CPU kernels' number of threads, the caller's included.

        Returns False if those kernels are not used.
        """
        if self._library is None:
            return False
        self._library.set_num_threads(num_threads)
        self.idle_cores = frozenset(os.sched_getaffinity(0) if num_threads > 1 else ())
        return True

    @property
    def kv_heads(self) -> range:
        """The KV heads of this rank's KVCache, numbered as in the whole model."""
        return self._part.kv_heads

    @property
    def why_not_helped(self) -> str:
        """The reason why no helper can have modules of this model; empty if a helper can have some."""
        if self._library is None:
            what = f"this model: {self.fallback_reason}"
            if self.device.type != "cpu":
                what = f"on {self.device.type}"
            return f"only the CPU's own kernels compute with a helper, and {self.computed_by} computes {what}"
        if self.shard is not None:
            return f"its heads are divided among the {self.shard.size} ranks of a tensor-parallel group"
        if len(self.layers) < self.spec.num_layers:
            return "its layers are divided among stages"
        return ""

    @property
    def library(self) -> Library:
        """The library of CPU kernels, with which a helper can compute (`why_not_helped`)."""
        assert self._library is not None, self.why_not_helped
        return self._library

    @property
    def heads(self) -> AttentionShape:
        """The attention heads of the whole model."""
        spec = self.spec
        return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5)

    @property
    def is_first_stage(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        return self.layers.stop == self.spec.num_layers

    @torch.inference_mode()
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load (Hugging Face name, tensor) pairs of the whole model or of these layers; cast to the dtype.

        Only this rank's part of each tensor is kept.

        Raises WeightsError for an unknown tensor, a wrong shape, or a missing tensor.
        """
        weights = Weights(self.spec, self.layers, self.dtype, self.device, self._part)
        weights.load(tensors)
        self._prepare(weights)

    @torch.inference_mode()
    def init_dummy_weights(self, seed: int = 0) -> None:
        """Make random weights for tests and benchmarks, drawn on the device.

        A part's weights equal those of the whole model on an equal device.
        """
        weights = Weights(self.spec, self.layers, self.dtype, self.device, self._part)
        weights.init_dummy(seed)
        self._prepare(weights)

    @property
    def layer_bytes(self) -> int:
        """Bytes of memory that the weights of a layer take.

        To be used only where a helper can have layers (`why_not_helped`).
        """
        return self._cpu_layers.layer_bytes

    @property
    def freed_bytes(self) -> int:
        """Bytes of memory that it takes to load the weights of freed layers again."""
        return len(self.freed_layers) * self.layer_bytes if self.freed_layers else 0

    def free_layers(self, layers: range) -> None:
        """Return the memory of these layers' weights to the system.

        None of these layers may be computed until `load_freed_layers`.
        """
        assert not self.freed_layers
        self._cpu_layers.free_layers(layers)
        self.freed_layers = layers

    @torch.inference_mode()
    def load_freed_layers(self, fill: Callable[[Weights], None]) -> None:
        """Load the weights of freed layers again, while other layers may compute. Blocking.

        `fill` fills the weights that it gets. If `fill` raises an error, the layers stay freed.
        """
        if self.freed_layers:
            weights = Weights(
                self.spec, self.freed_layers, self.dtype, self.device, self._part, has_ends=False
            )
            fill(weights)
            self._cpu_layers.load_layers(weights)
            self.freed_layers = range(0)

    @property
    def _cpu_layers(self) -> CpuLayers:
        assert isinstance(self._computed, CpuLayers), self.why_not_helped
        return self._computed

    def _prepare(self, weights: Weights) -> None:
        self._graphs = None
        self._positions = weights.positions
        if self._library is None and not self.fallback_reason:
            self._computed = self._triton = cuda.triton_layers(self.spec, weights)
            return
        computed = (
            TorchLayers(self.spec, weights)
            if self._library is None
            else CpuLayers(self._library, self.spec, weights)
        )
        self._computed = computed if self.shard is None else ShardedLayers(computed, self.spec, self.shard)

    def _graphs_over(self, kv: DeviceKVCache) -> "DecodeGraphs | None":
        """Return the decode graphs over the pages of `kv`; None unless the GPU's kernels compute."""
        if self._triton is not None and (self._graphs is None or self._graphs.kv is not kv):
            self._graphs = cuda.decode_graphs(self._triton, kv)
        return self._graphs

    def graph_sizes(self, max_batch: int) -> list[int]:
        """Return the batch sizes of the graphs that batches of up to `max_batch` need, ascending.

        Without graphs the result is `[1]`.
        """
        return [1] if self._triton is None else cuda.graph_sizes(max_batch)

    @property
    def _loaded(self) -> Layers:
        assert self._computed is not None, "weights must be loaded first"
        return self._computed

    @torch.inference_mode()
    def embed(self, batch: Batch) -> torch.Tensor:
        """Return hidden states `[T, hidden_size]` of the batch's tokens; first stage only."""
        assert self.is_first_stage, f"layers {self.layers} do not start with the embedding"
        hidden = self._loaded.embed(batch.token_ids)
        if self._positions is not None:
            hidden = hidden + embedding(batch.positions, self._positions)
        return hidden

    @torch.inference_mode()
    def forward_layer(
        self, layer: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        """Compute layer `layer` of the whole model over `hidden` [T, hidden_size]; return the same shape.

        Writes the batch's keys and values of this layer to their pages. The keys and values of earlier tokens
        must be there. Not to be called for a layer that a helper has, in whole or in part.
        """
        assert kv.helped is kv.hosted, "only whole passes go through a helper that has a part of each layer"
        return self.forward_layers(range(layer, layer + 1), hidden, batch, kv)

    @torch.inference_mode()
    def forward_layers(
        self, layers: range, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache
    ) -> torch.Tensor:
        """Compute consecutive layers, none of which a helper has.

        Shapes and effects are those of `forward_layer`. Raises HelperLost if a helper that has some of the
        heads or pages is lost.
        """
        assert kv.kv_heads == self.kv_heads, f"a KVCache of KV heads {kv.kv_heads}, not {self.kv_heads}"
        if layers and isinstance(self._computed, CpuLayers):
            return self._computed.forward_layers(layers, hidden, batch, kv)
        for layer in layers:
            hidden = self._loaded.forward_layer(layer, hidden, batch, kv)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[S, vocab_size]` of `hidden_rows` [S, hidden_size]; last stage only."""
        assert self.is_last_stage, f"layers {self.layers} do not end with the head"
        return self._loaded.logits(hidden_rows)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        """Return float32 logits `[S, vocab_size]` of each chunk's last token; for a model of one stage.

        On CUDA, decode steps over the pages of one cache are captured graphs: their logits are valid until
        the next pass. Raises HelperLost if a helper that has some of the modules is lost.
        """
        sent = self.send_to_helper(batch, kv)
        if sent is not None:
            return self.receive_from_helper(sent, batch, kv)
        graphs = self._graphs_over(kv)
        if graphs is not None and graphs.can_compute(batch):
            return graphs.forward(batch)
        hidden = self.forward_layers(self.layers, self.embed(batch), batch, kv)
        return self.logits(hidden[batch.last_rows])

    @torch.inference_mode()
    def send_to_helper(self, batch: Batch, kv: DeviceKVCache) -> PassAtHelper | None:
        """Compute the layers before those that a helper has, and send the pass to the helper.

        Returns None if no helper has layers.
        """
        hosted = kv.hosted
        if hosted is None:
            return None
        before = range(self.layers.start, hosted.layers.start)
        hidden = self.forward_layers(before, self.embed(batch), batch, kv)
        return self.ask_helper(hidden, batch, kv)

    @torch.inference_mode()
    def ask_helper(self, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache) -> PassAtHelper:
        """Send a pass to the helper that has layers, with the states `[T, hidden_size]` that enter these."""
        hosted = kv.hosted
        assert hosted is not None
        number = hosted.owner.ask(
            hosted.layers, batch.query_lens, batch.kv_lens, batch.page_tables, batch.page_size, hidden
        )
        return PassAtHelper(hosted, number)

    @torch.inference_mode()
    def receive_from_helper(self, sent: PassAtHelper, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        """Wait for a helper's answer, compute the further layers, and return the logits as `forward` does.

        Raises HelperLost if the helper does not answer in time.
        """
        behind = range(sent.hosted.layers.stop, self.layers.stop)
        hidden = self.forward_layers(behind, sent.take(), batch, kv)
        return self.logits(hidden[batch.last_rows])
