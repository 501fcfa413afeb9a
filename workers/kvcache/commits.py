"""Commits of a prompt's stored layers to the messenger: small layers are committed together.

Each commit is followed by a frame to the decode side and its acknowledgement. Commit, frame and
acknowledgement cost the two messengers as much processor time as copying some MiB. A large layer is
committed, and sent, as soon as it is stored (Mooncake, section 5.2). Small layers wait until they have
`_COMMITTED_BYTES` together, or the last layer is stored. So the commit at the end of a prefill has the last
layer and less than `_COMMITTED_BYTES` of earlier layers.

Owns: the choice of layers for each commit. Does not know: threads, how a commit travels.
"""

from collections.abc import Callable, Sequence

_COMMITTED_BYTES = 1 << 20
"""The number of stored bytes that are enough for a commit."""

Commit = Callable[[range, list[int], list[list[int]]], None]
"""A callback that commits layers of pages.

Its arguments are layers, pages, and xxh3-64 checksums `[page][layer]`.
"""


class Commits:
    """The commits of one prompt's `layers`. A block has `layer_bytes` bytes in each layer.

    `stored` must be called for the layers of a block in order. After some blocks, other blocks may begin at
    the first layer again.
    """

    def __init__(self, layers: range, layer_bytes: int, commit: Commit) -> None:
        self._layers, self._layer_bytes = layers, layer_bytes
        self._commit = commit
        self._first_layer = layers.start
        self._pages: list[int] = []
        self._waiting: list[list[int]] = []
        """Checksums of the pages, by layer from `_first_layer` on."""

    def stored(self, layer: int, pages: Sequence[int], checksums: list[int]) -> None:
        """Record that `layer` of `pages` is in the pool. The last layer commits all waiting layers."""
        if layer != self._first_layer + len(self._waiting) or list(pages) != self._pages:
            self._flush()
            self._first_layer, self._pages = layer, list(pages)
        self._waiting.append(checksums)
        num_bytes = len(self._waiting) * len(self._pages) * self._layer_bytes
        if num_bytes >= _COMMITTED_BYTES or layer == self._layers[-1]:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            layers = range(self._first_layer, self._first_layer + len(self._waiting))
            by_page = [list(of_page) for of_page in zip(*self._waiting, strict=True)]
            self._commit(layers, self._pages, by_page)
            self._first_layer, self._waiting = layers.stop, []
