"""Blocks of a prompt on their way from another instance's pool into the own one, as the worker sees it.

The messenger says how far they are; the load thread waits for that. Whatever goes wrong (holder gone, block
evicted, nothing comes) ends the fetch, and what has not come by then is computed.

Owns: one prompt's fetch. Does not know: how bytes travel, what is computed.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence

from kvstore.worker_client import WorkerClient
from mooncake.errors import MooncakeError
from mooncake.messages import MessengerAddress

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""for the next layer: computing is quicker than a holder that has stopped"""


class PrefixFetch:
    """Blocks `indices` of a reservation, which nobody else writes until it has ended."""

    def __init__(
        self, pool: WorkerClient, reservation_id: int, source: MessengerAddress, indices: Sequence[int]
    ) -> None:
        self.indices = list(indices)
        self.num_layers = [0] * len(indices)
        """of each block, how many layers have come"""
        self.pages: list[int] | None = None
        """of each block, where it is at the end"""
        self.has_ended = False
        """nothing more will come"""
        self.error: MooncakeError | None = None
        """of the own messenger, or PoolFullError: what the source hung in has no other pages"""
        self._pool, self._reservation_id = pool, reservation_id
        self._source = source
        self._changed = threading.Condition()
        self._num_blocks = self._num_layers = 0
        """so many layers of so many blocks, from the first ones on, have come; the other blocks never will"""
        self._is_over = False
        self._has_begun = asyncio.Event()
        self._fetching = asyncio.create_task(self._run())

    @property
    def expected_indices(self) -> list[int]:
        """The blocks that the holder has been found to have."""
        return self.indices[: self._num_blocks]

    async def begun(self) -> None:
        """Returns when the first layers have come, or nothing will."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._has_begun.wait()
        except TimeoutError:
            log.info("%s does not answer, its blocks are computed", self._source.instance)
            await self.ended(patience_s=0)

    async def ended(self, patience_s: float | None = PATIENCE_S) -> None:
        """Returns when nothing is fetched any more. After `patience_s` that is brought about."""
        await asyncio.wait([self._fetching], timeout=patience_s)
        if not self._fetching.done():
            await self._pool.stop_fetch(self._reservation_id)
            await asyncio.wait([self._fetching])

    def await_layer(self, layer: int, num_blocks: int) -> bool:
        """On the load thread: blocks until `layer` of the first `num_blocks` has come; False if it won't."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._num_blocks < num_blocks or self._num_layers > layer,
                PATIENCE_S,
            )
            return self._num_layers > layer and self._num_blocks >= num_blocks

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    async def _run(self) -> None:
        try:
            self.num_layers, self.pages = await self._pool.fetch(
                self._reservation_id, self._source, self.indices, self._on_layers
            )
        except MooncakeError as error:
            self.error = error
        finally:
            self.has_ended = True
            self._has_begun.set()
            self.give_up()

    def _on_layers(self, num_blocks: int, num_layers: int) -> None:
        self.num_layers[:num_blocks] = [num_layers] * num_blocks
        with self._changed:
            self._num_blocks, self._num_layers = num_blocks, num_layers
            self._changed.notify_all()
        self._has_begun.set()
