"""Copies between an engine's pages and blocks of the pool, for any order of a page's elements.

A layer of a block is `[kv_head][K, V][token][head_dim]`. An attention backend may keep keys transposed or
packed: the `order` of `EnginePages` says where each element of a page is. Blocks and pages with different
numbers of tokens are copied in *pieces*: the tokens that a block and a page have in common. `Orders` has the
order of each piece.

Owns: the arithmetic of pieces, the copies, checksums of gathered blocks. Does not know: vLLM, threads, when
something is copied.
"""

import functools
from collections.abc import Sequence
from ctypes import CDLL, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.connectors.vllm.plans import PlacedBlock
from messenger.wire.checksums import Addresses, Digests, copy_scattered
from mooncake.messages.blocks import DTYPE_BYTES, KVLayout
from mooncake.native import load_or_do_without

Order = np.ndarray[Any, np.dtype[np.int32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Orders(NamedTuple):
    """The order of the elements in each of n pieces: `table[rows[i]]` for piece i.

    `table` is a contiguous array `[row, element]`. Its values are places in memory, counted in elements from
    the piece's address.
    """

    table: Order
    rows: Rows

    @property
    def addresses(self) -> Addresses:
        """The addresses of the pieces' orders, `[n]`."""
        return self.table.ctypes.data + self.rows * self.table.strides[0]


def prepare() -> None:
    """Compile the copies' code, so that no step waits for the compiler."""
    _native()


class EnginePages:
    """The pages of an engine in this process's memory, mapped to blocks of one layout."""

    def __init__(
        self, layers: Sequence[int], page_stride: int, num_pages: int, order: Order, layout: KVLayout
    ) -> None:
        """Prepare the mapping of pages to blocks.

        Args:
            layers: The address of page 0 of each layer. The caller keeps the memory mapped.
            page_stride: The bytes from one page of a layer to the next page.
            num_pages: The number of pages.
            order: `[kv_head, 2, page_tokens, head_dim]`: the place of each element in a page of one layer.
            layout: The layout of the blocks.
        """
        self.layout, self.num_pages = layout, num_pages
        self._layers = np.array(layers, np.int64)
        self._page_stride = page_stride
        self._element_bytes = DTYPE_BYTES[layout.dtype]
        page_tokens = order.shape[2]
        piece_tokens = min(page_tokens, layout.block_size)
        block_order = np.arange(order.size // page_tokens * layout.block_size, dtype=np.int32).reshape(
            order.shape[0], 2, layout.block_size, order.shape[3]
        )
        self._page_orders = _parts(order, piece_tokens)
        self._block_orders = _parts(block_order, piece_tokens)

    def gather(self, layers: range, blocks: Sequence[PlacedBlock], targets: Addresses) -> Digests:
        """Copy `layers` of blocks out of pages, each to its address. Returns xxh3-64 `[block][layer]`."""
        staged = np.empty((len(blocks), len(layers), self.layout.layer_bytes), np.uint8)
        pieces = _Pieces(self, layers, blocks, staged)
        copy_indexed(
            pieces.in_blocks, pieces.block_orders, pieces.in_pages, pieces.page_orders, self._element_bytes
        )
        steps = np.arange(len(layers), dtype=np.int64) * self.layout.layer_bytes
        sources = staged.ctypes.data + np.arange(len(blocks) * len(layers)) * self.layout.layer_bytes
        scattered = (targets[:, None] + steps).reshape(-1)
        digests = copy_scattered(sources.astype(np.int64), scattered, self.layout.layer_bytes)
        return digests.reshape(len(blocks), len(layers))

    def scatter(self, layers: range, blocks: Sequence[PlacedBlock], staged: np.ndarray[Any, Any]) -> None:
        """Copy `layers` of blocks from `staged`, uint8 `[block, layer, bytes]`, to their pages."""
        pieces = _Pieces(self, layers, blocks, staged)
        copy_indexed(
            pieces.in_pages, pieces.page_orders, pieces.in_blocks, pieces.block_orders, self._element_bytes
        )


class _Pieces:
    """The pieces of some layers of blocks.

    Each piece has an address and an order in its page, and an address and an order in its staged block.
    """

    def __init__(
        self, engine: EnginePages, layers: range, blocks: Sequence[PlacedBlock], staged: np.ndarray[Any, Any]
    ) -> None:
        layer_bytes = engine.layout.layer_bytes
        assert staged.flags.c_contiguous
        assert staged.shape == (len(blocks), len(layers), layer_bytes)
        pieces = [
            (page, number, block.part, part)
            for number, block in enumerate(blocks)
            for part, page in enumerate(block.pages)
            if page is not None
        ]
        pages, numbers, page_parts, block_parts = np.array(pieces, np.int64).reshape(-1, 4).T
        assert ((pages >= 0) & (pages < engine.num_pages)).all(), "copies know no other bounds"
        base = engine._layers[layers.start : layers.stop]
        self.in_pages = (base + (pages * engine._page_stride)[:, None]).reshape(-1)
        in_block = staged.ctypes.data + np.arange(len(layers), dtype=np.int64) * layer_bytes
        self.in_blocks = (in_block + (numbers * len(layers) * layer_bytes)[:, None]).reshape(-1)
        self.page_orders = Orders(engine._page_orders, np.repeat(page_parts, len(layers)))
        self.block_orders = Orders(engine._block_orders, np.repeat(block_parts, len(layers)))


def copy_indexed(
    targets: Addresses, target_orders: Orders, sources: Addresses, source_orders: Orders, element_bytes: int
) -> None:
    """Copy pieces: each element goes from its place in the source order to its place in the target order.

    `targets` and `sources`: the addresses of the pieces. The compiled code copies all pieces in one call, and
    other threads run meanwhile. Without a compiler, numpy copies the pieces one by one.
    """
    if not len(targets):
        return
    native = _native()
    if native is None:
        kind = np.dtype(f"u{element_bytes}")
        for index, (target, source) in enumerate(zip(targets.tolist(), sources.tolist(), strict=True)):
            to = target_orders.table[target_orders.rows[index]]
            origin = source_orders.table[source_orders.rows[index]]
            found = _elements(source, int(origin.max()) + 1, kind)[origin]
            _elements(target, int(to.max()) + 1, kind)[to] = found
        return
    to_places, from_places = target_orders.addresses, source_orders.addresses
    native.copy_indexed(
        targets.ctypes.data,
        to_places.ctypes.data,
        sources.ctypes.data,
        from_places.ctypes.data,
        target_orders.table.shape[1],
        element_bytes,
        len(targets),
    )


def _elements(address: int, num_elements: int, kind: "np.dtype[Any]") -> np.ndarray[Any, Any]:
    interface = {"data": (address, False), "shape": (num_elements,), "typestr": kind.str, "version": 3}
    holder = type("_Memory", (), {"__array_interface__": interface})()
    return np.asarray(holder)


def _parts(order: Order, piece_tokens: int) -> Order:
    """Return an order split along its tokens: `[part, element]`."""
    num_heads, _, num_tokens, head_dim = order.shape
    parts = order.reshape(num_heads, 2, num_tokens // piece_tokens, piece_tokens, head_dim)
    return np.ascontiguousarray(parts.transpose(2, 0, 1, 3, 4), np.int32).reshape(
        num_tokens // piece_tokens, -1
    )


@functools.cache
def _native() -> CDLL | None:
    library = load_or_do_without(
        Path(__file__).with_name("indexed_copy.cpp"), "KVCache of engines is copied more slowly"
    )
    if library is not None:
        library.copy_indexed.argtypes = (
            *(c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_size_t, c_size_t, c_size_t),
        )
        library.copy_indexed.restype = None
    return library
