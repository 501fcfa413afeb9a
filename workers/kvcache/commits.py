"""What has been stored of one prompt, on its way to the messenger: small layers go there together.

A message, the frame to the decode side that follows it and the acknowledgement of that cost both messengers
as much processor time as copying some MiB. A large layer is committed, and sent, as soon as it is stored
(Mooncake, section 5.2); small ones wait for one another until they are `_COMMITTED_BYTES`, or the last one
is there: so much at most is still to be sent when all has been stored.

Owns: which layers go together. Does not know: threads, how a commit travels.
"""

from collections.abc import Callable, Sequence

_COMMITTED_BYTES = 1 << 20
"""worth a message"""

Commit = Callable[[range, list[int], list[list[int]]], None]
"""`layers` of `pages`, with the checksums `[page][layer]`"""


class Commits:
    """Of the `layers` that are stored here, `layer_bytes` each a block.

    They come in order, however often that begins anew with other blocks.
    """

    def __init__(self, layers: range, layer_bytes: int, commit: Commit) -> None:
        self._layers, self._layer_bytes = layers, layer_bytes
        self._commit = commit
        self._first_layer = layers.start
        self._pages: list[int] = []
        self._waiting: list[list[int]] = []
        """the checksums of those pages, by layer from `_first_layer` on"""

    def stored(self, layer: int, pages: Sequence[int], checksums: list[int]) -> None:
        """`layer` of `pages` is in the pool. The last one of `layers` leaves nothing waiting."""
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
