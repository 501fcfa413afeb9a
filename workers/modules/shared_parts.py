"""The parts of a model that can be at a helper: KV heads of all layers, some layers, or pages of sequences.

Owns: the memory of a part, what each side computes with it. Does not know: how the sides are connected, which
pages are lent.
"""

import math
from fractions import Fraction
from typing import Protocol

from kernels.cpu.hosted_layers import LayersHelper, LayersOwner, LayersShape
from kernels.cpu.mailbox import Wire
from kernels.cpu.moved_attention import AttentionHelper, AttentionOwner, MailboxShape
from mooncake.messages.migration import ModuleKind
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import Helped, HostedLayers, HostedPages, MovedHeads, RemotePages
from workers.engine.model import DecoderModel
from workers.errors import ModulesStayError
from workers.modules.link_messages import HostModules, Memory, MemoryLayout

_PARTS = 1000
"""The largest denominator of the fraction to which a share of sequences is rounded."""


class Hosted(Protocol):
    """The work of a helper's thread that answers an owner.

    The work is the computation of the hosted part (heads, layers or pages of sequences), or, for an owner on
    another host, the reads and writes of the part's pages (`PagesServer`).
    """

    def serve(self) -> None:
        """Answer the owner until `close`, on a thread of its own.

        Raises ValueError or IndexError for a pass or a message that does not fit.
        """

    def close(self) -> None:
        """End the exchange for both sides. Idempotent."""


class SharedPart(Protocol):
    """The part of a model that a `HostModules` names: its memory, and what each side does with it."""

    @property
    def layout(self) -> MemoryLayout: ...

    def own(
        self, memory: Memory, timeout_s: float, wire: Wire | None = None, remote: RemotePages | None = None
    ) -> Helped:
        """Return the part at the owner's side.

        A helper that takes longer than `timeout_s` for a layer counts as lost. `wire` and `remote` connect
        the owner with a helper on another host; None on the same host.
        """

    def host(self, memory: Memory, wire: Wire | None = None) -> Hosted:
        """Return the part at the helper's side.

        `wire` connects the helper with an owner on another host; None on the same host.
        """


def shared_part(request: HostModules, num_pages: int, model: DecoderModel, kv: DeviceKVCache) -> SharedPart:
    """Return the part that a request names, for `num_pages` pages of the owner."""
    match request.part.kind:
        case ModuleKind.HEADS | ModuleKind.PAGES:
            return _Attention(request, num_pages, model, kv)
        case ModuleKind.LAYERS:
            return _Layers(request, num_pages, model, kv)


def share_of(request: HostModules, model: DecoderModel) -> Fraction:
    """Return the part's fraction of the memory of all pages.

    Raises ModulesStayError for a part that the model does not have.
    """
    spec, part = model.spec, request.part
    match part.kind:
        case ModuleKind.PAGES:
            return Fraction(part.share).limit_denominator(_PARTS)
        case ModuleKind.LAYERS:
            assert part.layers is not None
            if part.layers.stop > spec.num_layers or part.layers.count == spec.num_layers:
                raise ModulesStayError(f"the model has {spec.num_layers} layers")
            return Fraction(part.layers.count, spec.num_layers)
        case ModuleKind.HEADS:
            if not 0 < part.num_heads < spec.num_kv_heads:
                raise ModulesStayError(f"the model has {spec.num_kv_heads} KV heads")
            return Fraction(part.num_heads, spec.num_kv_heads)


class _Attention:
    """The last KV heads of all pages, or all heads of some pages."""

    def __init__(self, request: HostModules, num_pages: int, model: DecoderModel, kv: DeviceKVCache) -> None:
        self._model, self._kv = model, kv
        heads, self._share = model.heads, None
        if request.part.kind is ModuleKind.PAGES:
            self._share = share_of(request, model)
            num_pages = math.ceil(self._share * num_pages)
        else:
            heads = heads.last(request.part.num_heads)
        self._shape = MailboxShape(
            request.most_tokens,
            request.most_sequences,
            num_pages,
            heads,
            kv.dtype,
            has_keys=self._share is not None,
        )
        layer_shape = (num_pages, heads.num_kv_heads, 2, kv.page_size, heads.head_dim)
        self.layout = MemoryLayout(self._shape.size_bytes, layer_shape, len(kv.layers), kv.dtype)

    def own(
        self, memory: Memory, timeout_s: float, wire: Wire | None = None, remote: RemotePages | None = None
    ) -> MovedHeads | HostedPages:
        owner = AttentionOwner(self._model.library, memory.mailbox, self._shape, timeout_s, wire)
        if self._share is not None:
            return HostedPages(self._share, memory.layers, owner, remote)
        return MovedHeads(memory.layers, owner, remote)

    def host(self, memory: Memory, wire: Wire | None = None) -> Hosted:
        windows = [self._model.spec.layer_sliding_window(layer) for layer in self._kv.layers]
        library, (mailbox, layers) = self._model.library, memory
        return _HostedAttention(AttentionHelper(library, mailbox, self._shape, layers, windows, wire))


class _HostedAttention:
    def __init__(self, helper: AttentionHelper) -> None:
        self._helper = helper
        self.close = helper.close

    def serve(self) -> None:
        while (described := self._helper.await_pass()) is not None:
            self._helper.host(described)


class _Layers:
    def __init__(self, request: HostModules, num_pages: int, model: DecoderModel, kv: DeviceKVCache) -> None:
        layers = request.part.layers
        assert layers is not None
        self._model, self._kv = model, kv
        self._layers, self._num_pages = range(layers.start, layers.stop), num_pages
        self._shape = LayersShape(
            request.most_tokens, request.most_sequences, num_pages, model.spec.hidden_size, kv.dtype
        )
        layer_shape = (num_pages, len(kv.kv_heads), 2, kv.page_size, model.spec.head_dim)
        self.layout = MemoryLayout(self._shape.size_bytes, layer_shape, len(self._layers), kv.dtype)

    def own(
        self, memory: Memory, timeout_s: float, wire: Wire | None = None, remote: RemotePages | None = None
    ) -> HostedLayers:
        owner = LayersOwner(self._model.library, memory.mailbox, self._shape, timeout_s, wire)
        return HostedLayers(self._layers, memory.layers, owner, remote)

    def host(self, memory: Memory, wire: Wire | None = None) -> Hosted:
        own = self._kv
        helper = LayersHelper(self._model.library, memory.mailbox, self._shape, wire)
        kv = DeviceKVCache(
            own.spec,
            self._layers,
            self._num_pages,
            own.page_size,
            own.dtype,
            own.device,
            memory=memory.layers,
            owner=helper,
        )
        return _HostedLayers(helper, self._model, kv)


class _HostedLayers:
    def __init__(self, helper: LayersHelper, model: DecoderModel, kv: DeviceKVCache) -> None:
        self._helper, self._model, self._kv = helper, model, kv
        self.close = helper.close

    def serve(self) -> None:
        while (asked := self._helper.await_pass()) is not None:
            described, hidden = asked
            layers = described.layers
            if not self._kv.layers.start <= layers.start < layers.stop <= self._kv.layers.stop:
                raise ValueError(f"expected some of the layers {self._kv.layers}, got {layers}")
            # The input is hidden states: of the tokens only their number counts.
            chunks = [
                Chunk([0] * query_len, kv_len - query_len, table.tolist())
                for query_len, kv_len, table in zip(
                    described.query_lens, described.kv_lens, described.page_tables, strict=True
                )
            ]
            batch = Batch.build(chunks, self._kv)
            hidden.copy_(self._model.forward_layers(layers, hidden, batch, self._kv))
            self._helper.answer()
