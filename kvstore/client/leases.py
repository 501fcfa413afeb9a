"""Leases on blocks of pools on this host, which are read in place.

Owns: the views of leased blocks. Does not know: how blocks are found.
"""

import contextlib
from collections.abc import Sequence

from kvstore.client.mapped import MappedConnection
from kvstore.protocol.answers import Leased
from mooncake.messages.blocks import BlockKey


class Lease:
    """A lease on blocks, whose `blocks` may be read until the lease ends. A context manager.

    A lease ends with `end`, `ttl_s` seconds after it was taken, when the client is closed, or when its
    messenger ends. From then on the memory may be given to another block at any time. A reader that may have
    read beyond the lease calls `verify` after reading: a block that is intact then was intact while it was
    read.
    """

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.blocks: list[memoryview | None] = [None] * len(keys)
        """Read-only views of whole blocks; None for blocks that were not found."""
        self._keys = keys
        self._pages: dict[int, tuple[MappedConnection, int, int]] = {}
        """Place of each leased block, by its position: connection, page and generation."""
        self._leases: list[tuple[MappedConnection, int]] = []

    def add(self, connection: MappedConnection, leased: Leased, positions: Sequence[int]) -> list[int]:
        """Add the blocks at `positions` that are leased.

        Returns the positions of blocks that are not leased.
        """
        self._leases.append((connection, leased.lease_id))
        layers = range(connection.layout.num_layers)
        missing = []
        for position, page in zip(positions, leased.pages, strict=True):
            if page is None:
                missing.append(position)
            else:
                self._pages[position] = (connection, page, connection.mapping.table.generation(page))
                self.blocks[position] = connection.mapping.view(page, layers).toreadonly()
        return missing

    def verify(self) -> list[bool]:
        """Return for each block whether its page still holds the block, with bytes that match its checksums.

        The result is False for a block that is not leased.
        """
        is_intact = [False] * len(self.blocks)
        for position, (connection, page, generation) in self._pages.items():
            is_there = connection.is_intact(self._keys[position], page)
            # The block may have left its page and come back: then the page has another generation.
            is_intact[position] = is_there and connection.mapping.table.generation(page) == generation
        return is_intact

    def end(self) -> None:
        """End the lease, and release its views. Idempotent."""
        leases, self._leases = self._leases, []
        for view in self.blocks:
            if view is not None:
                with contextlib.suppress(BufferError):  # the caller holds an array over it
                    view.release()
        for connection, lease_id in leases:
            with contextlib.suppress(OSError):  # a lost connection has ended its leases
                connection.end_lease(lease_id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
