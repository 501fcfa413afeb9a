"""Layers of granted pages that arrive as ranges of heads, from several senders with other shards.

A rank of a tensor-parallel group sends the heads that it has. The layer has arrived when the heads of all
ranks have arrived.

A layer is known here from its first part until it is complete. Invariants of a known layer: at least one head
has arrived or is being received, and for no head both are true.

Owns: which heads of such layers have arrived. Does not know: bytes, grants, layers that arrive whole.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Layer:
    """Masks of the heads of one layer: bit h is for the h-th head of this shard."""

    arrived: int = 0
    receiving: int = 0


class PartialLayers:
    """The partial layers of one grant, whose shard has `num_heads` heads.

    Layers and heads are positions in the shard.
    """

    def __init__(self, num_heads: int) -> None:
        self._all_heads = (1 << num_heads) - 1
        self._layers: dict[tuple[int, int], _Layer] = {}
        """Layers that have begun to arrive, by page and layer."""

    def knows(self, page: int, layer: int) -> bool:
        """Return whether some heads of a layer have arrived, or are being received."""
        return (page, layer) in self._layers

    def have_arrived(self, page: int, layer: int, heads: range) -> bool:
        """Return whether the layer is incomplete and all of these heads have arrived."""
        known = self._layers.get((page, layer))
        return known is not None and not _mask(heads) & ~known.arrived

    def begin(self, page: int, layer: int, heads: range) -> bool:
        """Begin to receive these heads.

        Returns False, and changes nothing, if any of them was begun before.
        """
        known = self._layers.get((page, layer))
        if known is None:
            known = self._layers[page, layer] = _Layer()
        elif (known.arrived | known.receiving) & _mask(heads):
            return False
        known.receiving |= _mask(heads)
        return True

    def complete(self, page: int, layer: int, heads: range) -> bool:
        """Record that these heads have arrived.

        Returns whether the layer is complete now. A complete layer is forgotten.
        """
        known = self._layers[page, layer]
        known.receiving &= ~_mask(heads)
        known.arrived |= _mask(heads)
        if known.arrived != self._all_heads:
            return False
        del self._layers[page, layer]
        return True

    def abandon(self, page: int, layer: int, heads: range) -> bool:
        """Stop receiving these heads. Returns whether the layer is forgotten.

        A layer is forgotten if no other head has arrived or is being received.
        """
        known = self._layers[page, layer]
        known.receiving &= ~_mask(heads)
        if known.arrived or known.receiving:
            return False
        del self._layers[page, layer]
        return True


def _mask(heads: range) -> int:
    return (1 << heads.stop) - (1 << heads.start)
