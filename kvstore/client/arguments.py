"""The layers and buffers that a program passes to the pool's library.

Owns: the checks of these arguments. Does not know: keys, connections.
"""

from typing import TYPE_CHECKING

from mooncake.errors import PoolError
from mooncake.messages.blocks import KVLayout

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def checked_layers(layers: range | None, layout: KVLayout) -> range:
    """Return the layers to read: `layers`, or all layers if `layers` is None.

    Raises PoolError unless they are consecutive layers of the layout.
    """
    all_layers = range(layout.num_layers)
    if layers is None:
        return all_layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= len(all_layers):
        raise PoolError(f"consecutive layers within {all_layers} can be read, not {layers}")
    return layers


def bytes_of(
    buffer: "ReadableBuffer", layout: KVLayout, num_layers: int, *, writable: bool = False
) -> memoryview:
    """Return the bytes of a buffer for `num_layers` layers of a block.

    Raises PoolError if the buffer has another size or is not contiguous, or if it is read-only but `writable`
    is set.
    """
    try:
        view = memoryview(buffer).cast("B")
    except TypeError as error:
        raise PoolError(f"a block must lie in one piece: {error}") from None
    wanted_bytes = num_layers * layout.layer_bytes
    if len(view) != wanted_bytes:
        relation = "larger than a page" if len(view) > wanted_bytes else "shorter than a block"
        raise PoolError(
            f"a buffer of {len(view)} bytes is {relation}: {num_layers} layers of this layout take"
            f" {wanted_bytes} bytes"
        )
    if writable and view.readonly:
        raise PoolError("a buffer that is to be filled is read-only")
    return view
