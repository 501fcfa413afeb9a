"""A pass of layer-wise prefill (Mooncake, section 5.2), also where a helper has some of the layers.

A pass through a helper is cut into pieces, so that this process computes a piece while the helper has the one
before (BanaServe, section 4.1, figure 3).

Owns: the order in which layers are loaded, computed and stored. Does not know: prompts, the thread on which
a pass runs.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait

import torch

from kernels.cpu.hosted_layers import NUM_SLOTS
from kernels.cpu.mailbox import HelperLost
from mooncake.errors import TransferError
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import HostedLayers
from workers.engine.model import DecoderModel, PassAtHelper
from workers.kvcache.copies import Mark
from workers.kvcache.layerwise import LayerTransfers, PassPart


class CancelledOnDevice(Exception):
    """The error of a pass that was given up. No part of the pass runs on the device any more."""


class PrefillPass:
    """A pass of `parts`, one part after the other, on the device thread.

    Loads run one layer ahead of the computation, and stores after it. Stores may still run when the pass has
    ended (`PassPart.storing`).

    Args:
        all_dropped: Returns whether all parts are dropped. The pass is given up then before its next layer.
        waiting: Calls that wait to cut in. `cut_in` makes them.
        keep_pace: Waits for a GPU that has too many layers queued.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: DeviceKVCache,
        parts: Sequence[PassPart],
        transfers: LayerTransfers,
        all_dropped: Callable[[], bool],
        waiting: Collection[object],
        cut_in: Callable[[], None],
        keep_pace: Callable[[], None],
    ) -> None:
        self._model, self._kv, self._parts, self._transfers = model, kv, parts, transfers
        self._all_dropped, self._waiting = all_dropped, waiting
        self._cut_in, self._keep_pace = cut_in, keep_pace
        self._loading: Future[list[Mark]] | None = None
        """The load of the next layer."""

    def compute(self, hidden: torch.Tensor | None, most_at_once: int | None) -> torch.Tensor:
        """Return the states `[T, hidden_size]` that leave the model's layers.

        Args:
            hidden: The states that enter the layers, on any device; None in the first stage.
            most_at_once: The most tokens that a layer computes at a time; None for no limit. Without a helper
                only passes of one part may have more tokens.

        Raises `CancelledOnDevice`, and HelperLost if a helper that has layers is lost.
        """
        chunks = [part.chunk for part in self._parts]
        self._loading = self._transfers.launch_load(self._model.layers.start, self._parts)
        if self._kv.hosted is None:
            batches = [Batch.build(some, self._kv) for some in _in_turn(chunks, most_at_once)]
            return self._through_layers(batches, hidden)
        shape = self._kv.hosted.owner.shape
        most_tokens = min(most_at_once or shape.num_tokens, shape.num_tokens)
        pieces = [Batch.build(some, self._kv) for some in pieces_of(chunks, most_tokens, shape.num_sequences)]
        return self._through_helper(pieces, self._kv.hosted)

    # -- all layers here ----------------------------------------------------------------------------

    def _through_layers(self, batches: Sequence[Batch], hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute layer after layer, each with one batch after the other."""
        if hidden is None:
            states = [self._model.embed(batch) for batch in batches]
        else:
            states = list(torch.split(hidden.to(self._kv.device), [batch.num_tokens for batch in batches]))
        for layer in self._model.layers:
            self._arrive(layer)
            for index, batch in enumerate(batches):
                if index:
                    self._cut_in()
                states[index] = self._model.forward_layer(layer, states[index], batch, self._kv)
            self._transfers.launch_store(layer, self._parts)
            self._keep_pace()
            self._cut_in()
        return torch.cat(states) if len(states) > 1 else states[0]

    def _arrive(self, layer: int) -> None:
        """Wait until a layer is loaded, and begin to load the next one. Raises `CancelledOnDevice`."""
        loading, self._loading = self._loading, None
        self._transfers.wait_loaded(loading, self._parts)
        if self._all_dropped():
            raise CancelledOnDevice
        if layer + 1 in self._model.layers:
            self._loading = self._transfers.launch_load(layer + 1, self._parts)

    # -- some layers at a helper --------------------------------------------------------------------

    def _through_helper(self, pieces: Sequence[Batch], hosted: HostedLayers) -> torch.Tensor:
        """Compute piece after piece. Calls cut in between two pieces, while the helper has none."""
        at_helper = deque[tuple[int, PassAtHelper]]()
        ended: list[torch.Tensor] = []
        last = len(pieces) - 1

        def take() -> None:
            index, sent = at_helper.popleft()
            ended.append(self._behind(pieces[index], sent, is_first=index == 0, is_last=index == last))

        try:
            for index, piece in enumerate(pieces):
                while len(at_helper) == NUM_SLOTS or (at_helper and self._waiting):
                    take()
                self._cut_in()
                at_helper.append(
                    (index, self._before(piece, hosted, is_first=index == 0, is_last=index == last))
                )
            while at_helper:
                take()
        except TransferError as error:  # of a load to the pages of a helper on another host
            raise HelperLost(str(error)) from None
        finally:
            self._end(at_helper)
        return torch.cat(ended)

    def _before(self, piece: Batch, hosted: HostedLayers, *, is_first: bool, is_last: bool) -> PassAtHelper:
        """Compute the layers before the helper's layers, and send the piece to the helper.

        The helper's layers of all loaded blocks must be in its pages before.
        """
        if self._all_dropped():
            raise CancelledOnDevice
        before = range(self._model.layers.start, hosted.layers.start)
        states = self._layers(before, self._model.embed(piece), piece, is_first=is_first, is_last=is_last)
        if is_first:
            for layer in hosted.layers:
                self._arrive(layer)
        return self._model.ask_helper(states, piece, self._kv)

    def _behind(self, piece: Batch, sent: PassAtHelper, *, is_first: bool, is_last: bool) -> torch.Tensor:
        """Wait for the helper's answer, and compute the layers behind its layers. Raises HelperLost."""
        states = sent.take()
        if is_last:
            for layer in sent.hosted.layers:
                self._transfers.launch_store(layer, self._parts)
        behind = range(sent.hosted.layers.stop, self._model.layers.stop)
        return self._layers(behind, states, piece, is_first=is_first, is_last=is_last)

    def _layers(
        self, layers: range, states: torch.Tensor, piece: Batch, *, is_first: bool, is_last: bool
    ) -> torch.Tensor:
        """Compute layers of a piece. The first piece waits for their loads, the last one stores them."""
        for layer in layers:
            if is_first:
                self._arrive(layer)
            states = self._model.forward_layer(layer, states, piece, self._kv)
            if is_last:
                self._transfers.launch_store(layer, self._parts)
        return states

    def _end(self, at_helper: Collection[tuple[int, PassAtHelper]]) -> None:
        """Wait until neither a load nor the helper writes to pages of this pass.

        Raises HelperLost if the helper may still write to them.
        """
        if self._loading is not None:
            wait([self._loading])
        for _, sent in at_helper:
            sent.take()


def pieces_of(chunks: Sequence[Chunk], most_tokens: int, most_chunks: int) -> list[list[Chunk]]:
    """Return a pass's chunks in pieces of at most `most_tokens` tokens, in at most `most_chunks` chunks."""
    pieces: list[list[Chunk]] = []
    num_free = 0
    for chunk in chunks:
        begin = 0
        while begin < len(chunk.token_ids):
            if not num_free or len(pieces[-1]) == most_chunks:
                pieces.append([])
                num_free = most_tokens
            end = min(len(chunk.token_ids), begin + num_free)
            pieces[-1].append(Chunk(chunk.token_ids[begin:end], chunk.start + begin, chunk.pages))
            num_free -= end - begin
            begin = end
    return pieces


def _in_turn(chunks: Sequence[Chunk], most_at_once: int | None) -> Sequence[Sequence[Chunk]]:
    """Return a pass's chunks in batches that each layer computes one after the other."""
    if most_at_once is None or sum(len(chunk.token_ids) for chunk in chunks) <= most_at_once:
        return [chunks]
    assert len(chunks) == 1, "only a pass of one part is that long"
    return pieces_of(chunks, most_at_once, 1)
