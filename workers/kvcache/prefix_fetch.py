"""Blocks of a prompt on their way from another instance's pool into the own one, as the worker sees it.

The messenger says how far they are, and that bytes come at all; the load thread waits for that. Whatever goes
wrong (holder gone or too slow, block evicted, nothing comes) ends the fetch, and what has not come by then is
computed.

A holder that goes on sending is waited for, one that stops is not. Whether a fetch pays is the Conductor's to
estimate; here it gets altogether, on top of `_GRACE_S`, the time in which a slow instance computes as many
tokens, and is given up when it is seen to be slower. So that a slow one does not hold up a pass that others
share, its prompt joins one only when the last layers are near.

Owns: one prompt's fetch. Does not know: how bytes travel, what is computed.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import MooncakeError
from mooncake.messages.pools import PoolShard

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""since the last sign of the holder's life: computing is quicker than one that has stopped"""
_GRACE_S = 4.0
"""of a fetch of few blocks"""
_SLOW_TOKENS_PER_S = 100
"""computed by an instance whose prefixes are hardly worth being fetched any slower"""


class PrefixFetch:
    """Blocks `indices` of a reservation, which nobody else writes until it has ended."""

    def __init__(
        self, pool: WorkerClient, reservation_id: int, sources: Sequence[PoolShard], indices: Sequence[int]
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
        self._sources = sources
        self._begun_s = self._heard_s = time.monotonic()
        """when it began, and when the holder last gave a sign of life"""
        num_tokens = len(indices) * pool.segment.layout.block_size
        self._deadline_s = self._begun_s + _GRACE_S + num_tokens / _SLOW_TOKENS_PER_S
        self._changed = threading.Condition()
        self._num_blocks = self._num_layers = 0
        """so many layers of so many blocks, from the first ones on, have come; the other blocks never will"""
        self._is_over = False
        self._heard = asyncio.Event()
        """set at each sign of life, and at the end"""
        self._fetching = asyncio.create_task(self._run())

    @property
    def expected_indices(self) -> list[int]:
        """The blocks that the holder has been found to have."""
        return self.indices[: self._num_blocks]

    async def begun(self) -> None:
        """Returns when the first layers have come and the last ones are near, or nothing more will come.

        Near: here within `PATIENCE_S`, at their pace so far. Who waits here holds up no pass.
        """
        while not (self.has_ended or self._is_near):
            left_s = self._left_s(PATIENCE_S)
            if left_s <= 0 or self._is_too_slow:
                names = ", ".join(shard.messenger.instance for shard in self._sources)
                log.info("%s: nothing comes, or too slowly, the blocks are computed", names)
                await self.ended(patience_s=0)
                return
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._heard.wait()

    async def ended(self, patience_s: float | None = PATIENCE_S) -> None:
        """Returns when nothing is fetched any more. That is brought about if the holder gives no sign of life
        for `patience_s`, or takes too long; not if None."""
        await asyncio.wait([self._fetching], timeout=0)  # by then the messenger has been asked to fetch
        while patience_s is not None and not self._fetching.done():
            left_s = self._left_s(patience_s)
            if left_s <= 0:
                await self._pool.stop_fetch(self._reservation_id)
                break
            await asyncio.wait([self._fetching], timeout=left_s)
        await asyncio.wait([self._fetching])

    def await_layer(self, layer: int, num_blocks: int) -> bool:
        """On the load thread: blocks until `layer` of the first `num_blocks` has come; False if it won't, or
        is not worth waiting for: then no later layer is either."""
        with self._changed:
            while not (self._is_over or self._num_blocks < num_blocks or self._num_layers > layer):
                left_s = self._left_s(PATIENCE_S)
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    self._is_over = True
            return self._num_layers > layer and self._num_blocks >= num_blocks

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _left_s(self, patience_s: float) -> float:
        """How much longer it is waited for if nothing is heard."""
        return min(self._heard_s + patience_s, self._deadline_s) - time.monotonic()

    @property
    def _is_near(self) -> bool:
        return self._num_layers > 0 and self._expected_end_s <= self._heard_s + PATIENCE_S

    @property
    def _is_too_slow(self) -> bool:
        """The first moments do not count: there may have been a connection to be made."""
        has_pace = self._num_layers > 0 and self._heard_s >= self._begun_s + PATIENCE_S
        return has_pace and self._expected_end_s > self._deadline_s

    @property
    def _expected_end_s(self) -> float:
        """If the layers to come are as quick as those that are there."""
        layer_s = (self._heard_s - self._begun_s) / self._num_layers
        return self._begun_s + layer_s * self._pool.segment.layout.num_layers

    async def _run(self) -> None:
        try:
            self.num_layers, self.pages = await self._pool.fetch(
                self._reservation_id, self._sources, self.indices, self._on_layers
            )
        except MooncakeError as error:
            self.error = error
        finally:
            self.has_ended = True
            self._heard.set()
            self.give_up()

    def _on_layers(self, num_blocks: int, num_layers: int) -> None:
        self.num_layers[:num_blocks] = [num_layers] * num_blocks
        with self._changed:
            self._num_blocks, self._num_layers = num_blocks, num_layers
            self._heard_s = time.monotonic()
            self._changed.notify_all()
        self._heard.set()
