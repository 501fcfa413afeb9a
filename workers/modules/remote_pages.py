"""Pages at a helper on another host: the owner reads and writes them over a stream, whole pages at a time.

    owner                                             helper
    header, page numbers, blocks (if a write) ->
                                              <-      blocks (if a read), or a byte (if a write)

Blocks are whole pages of the hosted heads, layer by layer.

Owns: both ends of the stream. Does not know: when pages are copied, and why.
"""

import contextlib
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.library import Library
from kernels.cpu.page_copy import PageCopies
from mooncake.errors import TransferError

_STAGED_BYTES = 8 << 20
"""The most bytes of pages in one message, unless a single page has more."""
_HEADER = struct.Struct("<?III")
"""The header: whether pages are written, first layer, end of the layers, number of pages."""
_WRITTEN = b"\x01"


@dataclass(frozen=True, slots=True)
class PagesShape:
    """The shape of the hosted pages of all hosted layers.

    `layer_shape` is `[num_pages, num_heads, 2, page_size, head_dim]`.
    """

    num_layers: int
    layer_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page with all its layers."""
        return self.num_layers * torch.Size(self.layer_shape[1:]).numel() * self.dtype.itemsize

    @property
    def pages_at_a_time(self) -> int:
        """The most pages, each with all its layers, that one message carries."""
        return max(1, _STAGED_BYTES // self._page_bytes)

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that each end has for the blocks of a message."""
        return self.pages_at_a_time * self._page_bytes

    def new_blocks(self, num_layers: int, num_pages: int) -> torch.Tensor:
        """Return new memory for blocks, `[num_layers, num_pages, num_heads, 2, page_size, head_dim]`."""
        return torch.empty((num_layers, num_pages, *self.layer_shape[1:]), dtype=self.dtype)


class PagesClient:
    """The owner's end of the stream (`workers.engine.kvcache.helped_parts.RemotePages`).

    Any thread may call its methods; calls wait for each other. All calls raise TransferError once the helper
    cannot be reached, or nothing moves on the stream for `timeout_s` seconds.
    """

    def __init__(
        self, sock: socket.socket, shape: PagesShape, timeout_s: float, on_lost: Callable[[], None]
    ) -> None:
        """Take ownership of `sock`. `on_lost` is called on the thread of a call that fails."""
        self._shape, self.pages_at_a_time, self._on_lost = shape, shape.pages_at_a_time, on_lost
        self._sock, self._lock = sock, threading.Lock()
        weakref.finalize(self, sock.close)  # `close` does not, as a call may still use the descriptor
        sock.settimeout(timeout_s)

    def new_blocks(self, num_layers: int, num_pages: int) -> torch.Tensor:
        """Return new memory for blocks, `[num_layers, num_pages, num_heads, 2, page_size, head_dim]`."""
        return self._shape.new_blocks(num_layers, num_pages)

    def close(self) -> None:
        """End the stream, and with it calls in progress. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def read_layer(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return copies of `pages` (int64 `[n]`) of a hosted layer: `[n, num_heads, 2, page_size, head_dim]`.

        `layer` counts from the first hosted layer.
        """
        into = self.new_blocks(1, len(pages))
        self._read(range(layer, layer + 1), pages.tolist(), into)
        return into[0]

    def write_layer(self, layer: int, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy blocks `[n, num_heads, 2, page_size, head_dim]` into pages of a hosted layer.

        `layer` counts from the first hosted layer.
        """
        self._write(range(layer, layer + 1), pages.tolist(), blocks[None].contiguous())

    def read(self, pages: Sequence[int], into: torch.Tensor) -> None:
        """Copy pages of all hosted layers into `[num_layers, n, num_heads, 2, page_size, head_dim]`."""
        self._read(range(self._shape.num_layers), pages, into)

    def write(self, pages: Sequence[int], blocks: torch.Tensor) -> None:
        """Copy blocks, shaped as in `read`, into pages of all hosted layers."""
        self._write(range(self._shape.num_layers), pages, blocks)

    def _read(self, layers: range, pages: Sequence[int], into: torch.Tensor) -> None:
        for begin in range(0, len(pages), self.pages_at_a_time):
            some = pages[begin : begin + self.pages_at_a_time]
            with self._asking():
                _send(self._sock, _asked(layers, some, is_write=False))
                for layer in into[:, begin : begin + len(some)]:
                    _receive_into(self._sock, _bytes_of(layer))

    def _write(self, layers: range, pages: Sequence[int], blocks: torch.Tensor) -> None:
        for begin in range(0, len(pages), self.pages_at_a_time):
            some = pages[begin : begin + self.pages_at_a_time]
            with self._asking():
                _send(self._sock, _asked(layers, some, is_write=True))
                for layer in blocks[:, begin : begin + len(some)]:
                    _send(self._sock, _bytes_of(layer))
                _receive_into(self._sock, memoryview(bytearray(len(_WRITTEN))))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                self.close()  # what has been sent of a message cannot be taken back
                self._on_lost()
                raise TransferError(
                    f"the helper's pages cannot be reached: {str(error) or type(error).__name__}"
                ) from None


class PagesServer:
    """The helper's end of the stream. `layers` has a tensor of shape `layer_shape` for each hosted layer."""

    def __init__(
        self, library: Library, sock: socket.socket, shape: PagesShape, layers: Sequence[torch.Tensor]
    ) -> None:
        """Take `sock` for `serve`; the caller closes it."""
        self._sock, self._shape = sock, shape
        sock.setblocking(True)
        self._staged = shape.new_blocks(shape.num_layers, shape.pages_at_a_time)
        self._out = PageCopies(library, zip(layers, self._staged, strict=True))
        self._in = PageCopies(library, zip(self._staged, layers, strict=True))

    def serve(self) -> None:
        """Answer until the stream ends. Raises ValueError or IndexError for a message that does not fit."""
        head = memoryview(bytearray(_HEADER.size))
        with contextlib.suppress(OSError):
            while True:
                _receive_into(self._sock, head)
                self._answer(*_HEADER.unpack(head))

    def close(self) -> None:
        """End the stream. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _answer(self, is_write: bool, first: int, end: int, num_pages: int) -> None:
        layers, shape = range(first, end), self._shape
        if not (0 <= first < end <= shape.num_layers and 0 < num_pages <= shape.pages_at_a_time):
            raise ValueError(f"{num_pages} pages of layers {layers} do not fit {shape}")
        numbers = torch.empty(num_pages, dtype=torch.int64)
        _receive_into(self._sock, _bytes_of(numbers))
        pages, places, staged = numbers.tolist(), range(num_pages), self._staged[first:end, :num_pages]
        if is_write:
            for layer in staged:
                _receive_into(self._sock, _bytes_of(layer))
            self._in.copy(places, pages, layers)
            _send(self._sock, _WRITTEN)
        else:
            self._out.copy(pages, places, layers)
            for layer in staged:
                _send(self._sock, _bytes_of(layer))


def _asked(layers: range, pages: Sequence[int], *, is_write: bool) -> bytes:
    header = _HEADER.pack(is_write, layers.start, layers.stop, len(pages))
    return header + struct.pack(f"<{len(pages)}q", *pages)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().data


def _send(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all bytes. Raises OSError, also if none can be sent for the timeout of `sock`.

    `sendall` would raise it after the timeout though bytes move all the time, on a slow link.
    """
    left = memoryview(data)
    while left:
        left = left[sock.send(left) :]


def _receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer. Raises OSError if the stream ends before."""
    while buffer:
        num_bytes = sock.recv_into(buffer)
        if not num_bytes:
            raise ConnectionError("the stream has ended")
        buffer = buffer[num_bytes:]
