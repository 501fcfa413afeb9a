"""The worker's part in a fetch of a prompt's blocks from another instance, the *source*, into its own pool.

While bytes arrive, the messenger reports how many layers have arrived; the load thread waits for layers. Any
failure (source gone or too slow, block evicted, silence) ends the fetch, and blocks that have not arrived by
then are computed.

The worker waits for a source that goes on sending, not for a silent one. The Conductor has estimated that the
fetch takes less time than computing the blocks. Here the fetch gets `_GRACE_S` plus the time in which a slow
instance would compute the blocks, and is given up as soon as it is expected to take longer. A slow fetch must
not delay a pass that other prompts share. So a prompt joins a pass only when the pass will hardly wait for
the last layers of the prompt's fetch.

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

SILENCE_S = 1.0
"""Seconds of the source's silence after which the fetch is given up."""
_GRACE_S = 4.0
"""The part of a fetch's time limit that does not depend on the number of blocks, in seconds."""
_SLOW_TOKENS_PER_S = 100
"""Tokens a second of an instance that computes slowly. A slower fetch does not pay."""


class PrefixFetch:
    """The fetch of the blocks at `indices` of a reservation, which begins at once, as a task.

    Until the fetch has ended, the worker may write only those of the blocks that the source turned out to
    lack.
    """

    def __init__(
        self, pool: WorkerClient, reservation_id: int, sources: Sequence[PoolShard], indices: Sequence[int]
    ) -> None:
        self.indices = list(indices)
        self.num_layers = [0] * len(indices)
        """Number of layers that have arrived, by block."""
        self.pages: list[int] | None = None
        """The blocks' pool pages; None until the fetch has ended."""
        self.has_ended = False
        """Whether no further layer will arrive."""
        self.error: MooncakeError | None = None
        """The error with which this worker's messenger ended the fetch, if any.

        After a PoolFullError, a hanging source may still write the fetch's pages, and no other pages are free
        for these blocks.
        """
        self.sources = sources
        self._pool, self._reservation_id = pool, reservation_id
        self.begun_s = self.heard_s = time.monotonic()
        """Times of the beginning, and of the source's last sign of life, by `time.monotonic`."""
        num_tokens = len(indices) * pool.segment.layout.block_size
        self._deadline_s = self.begun_s + _GRACE_S + num_tokens / _SLOW_TOKENS_PER_S
        self._changed = threading.Condition()
        self._num_blocks = self._num_layers_of_all = 0
        """Two numbers of the latest report.

        `_num_blocks` is how many leading blocks the source has; blocks behind them will not arrive.
        `_num_layers_of_all` is how many layers have arrived of all these blocks.
        """
        self._is_over = False
        self._heard = asyncio.Event()
        """Event that is set at each sign of life of the source, and at the end of the fetch."""
        self._fetching = asyncio.create_task(self._run())

    @property
    def expected_indices(self) -> list[int]:
        """The indices of the blocks that the source turned out to have; empty before the first report."""
        return self.indices[: self._num_blocks]

    async def begun(self, compute_s: float = 0.0) -> None:
        """Wait until the last layers are about to arrive, or nothing more will arrive.

        The last layers are about to arrive if, at the pace so far, they arrive at most `SILENCE_S` after a
        pass that begins now and computes for `compute_s` seconds. A fetch that is silent or too slow is
        stopped. A prompt that waits here delays no pass.
        """
        while not (self.has_ended or self._is_near(compute_s)):
            left_s = self._left_s(SILENCE_S)
            if left_s <= 0 or self._is_too_slow:
                names = ", ".join(shard.messenger.instance for shard in self.sources)
                log.info("%s: nothing comes, or too slowly, the blocks are computed", names)
                await self.ended(silence_s=0)
                return
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._heard.wait()

    async def ended(self, silence_s: float | None = SILENCE_S) -> None:
        """Wait for the end of the fetch.

        The fetch is stopped if the source is silent for `silence_s` seconds, or takes too long. If
        `silence_s` is None, the fetch is never stopped.
        """
        await asyncio.wait([self._fetching], timeout=0)  # by then the messenger has been asked to fetch
        while silence_s is not None and not self._fetching.done():
            left_s = self._left_s(silence_s)
            if left_s <= 0:
                await self._pool.stop_fetch(self._reservation_id)
                break
            await asyncio.wait([self._fetching], timeout=left_s)
        await asyncio.wait([self._fetching])

    def await_layer(self, layer: int, num_blocks: int) -> bool:
        """Block the load thread until `layer` of the first `num_blocks` blocks has arrived.

        Returns False if the layer will not arrive, or is not worth waiting for. The same is then true of all
        later layers.
        """
        with self._changed:
            while not (self._is_over or self._num_blocks < num_blocks or self._num_layers_of_all > layer):
                left_s = self._left_s(SILENCE_S)
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    self._is_over = True
            return self._num_layers_of_all > layer and self._num_blocks >= num_blocks

    def give_up(self) -> None:
        """Stop waiting for further layers."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _left_s(self, silence_s: float) -> float:
        """Return the seconds for which the fetch is still awaited if the source stays silent."""
        return min(self.heard_s + silence_s, self._deadline_s) - time.monotonic()

    def _is_near(self, compute_s: float) -> bool:
        near_s = self.heard_s + compute_s + SILENCE_S
        return self._num_layers_of_all > 0 and self._expected_end_s <= near_s

    @property
    def _is_too_slow(self) -> bool:
        """Whether the fetch will miss its deadline at its present pace.

        False in the first `SILENCE_S` seconds, in which connecting may take time.
        """
        has_pace = self._num_layers_of_all > 0 and self.heard_s >= self.begun_s + SILENCE_S
        return has_pace and self._expected_end_s > self._deadline_s

    @property
    def _expected_end_s(self) -> float:
        """The time at which the fetch ends at its present pace."""
        layer_s = (self.heard_s - self.begun_s) / self._num_layers_of_all
        return self.begun_s + layer_s * self._pool.segment.layout.num_layers

    async def _run(self) -> None:
        try:
            self.num_layers, self.pages = await self._pool.fetch(
                self._reservation_id, self.sources, self.indices, self._on_layers
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
            self._num_blocks, self._num_layers_of_all = num_blocks, num_layers
            self.heard_s = time.monotonic()
            self._changed.notify_all()
        self._heard.set()
