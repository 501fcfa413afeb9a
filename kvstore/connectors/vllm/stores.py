"""Stores: the blocks that a step completes go to the pool layer by layer, while later layers are computed.

When the step ends they are in the pool, or given up: the engine may give their pages to others. A pool that
is full, silent or gone costs a step a moment, then the next ones nothing for a while.

Owns: the store in progress. Does not know: requests, which blocks are complete.
"""

import logging
import threading
import time
from collections.abc import Sequence

from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm.pages import EnginePages
from kvstore.connectors.vllm.plans import PlacedBlock
from messenger.wire.checksums import Addresses, Digests
from mooncake.errors import MooncakeError

log = logging.getLogger(__name__)

_ROOM_S = 0.5
"""Time that the pool may take to make room."""
_BEGIN_S = 0.1
"""Time that the end of a step waits for pages that the pool has not given so far."""
_COPY_S = 2.0
"""Time that the end of a step waits for the rest of the copies."""
_PAUSE_S = 1.0
"""Time without stores after one that failed."""


class _GivenUpError(Exception):
    """The end of a store whose step could not wait for it."""


class _Running:
    """The store of one step's blocks. `wait_for` and `copy` are called by the store's thread."""

    def __init__(self, pages: EnginePages, blocks: list[PlacedBlock]) -> None:
        self._pages, self.blocks = pages, blocks
        self._changed = threading.Condition()
        self._num_layers = 0
        """Leading layers that have been computed."""
        self._is_given_up = False
        self.has_begun = False
        """Whether the pool has given pages."""
        self.has_ended = threading.Event()

    def computed(self, num_layers: int) -> None:
        with self._changed:
            self._num_layers = num_layers
            self._changed.notify()

    def give_up(self) -> None:
        """Return when the engine's pages are not read any more."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify()

    def copy(self, layers: range, positions: Sequence[int], targets: Addresses) -> Digests:
        """Copy layers to the pool's pages when they have been computed. Raises _GivenUpError."""
        self.has_begun = True
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._num_layers >= layers.stop)
            if self._is_given_up:
                raise _GivenUpError
            return self._pages.gather(layers, [self.blocks[position] for position in positions], targets)


class Stores:
    """The stores of one worker, one at a time. All but its thread is the engine's."""

    def __init__(self, pool: KVCachePool, pages: EnginePages) -> None:
        self._pool, self._pages = pool, pages
        self._running: _Running | None = None
        """The store of this step."""
        self._unfinished: _Running | None = None
        """A store that was given up and has not noticed."""
        self._resume_s = 0.0
        self._work: _Running | None = None
        self._has_work = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._serve, name="mooncake-store", daemon=True).start()

    def begin(self, blocks: list[PlacedBlock]) -> None:
        """Begin to store the blocks that this step completes."""
        is_busy = self._unfinished is not None and not self._unfinished.has_ended.is_set()
        if not blocks or is_busy or time.monotonic() < self._resume_s:
            return
        self._running, self._unfinished = _Running(self._pages, blocks), None
        with self._has_work:
            self._work = self._running
            self._has_work.notify()

    def computed(self, layer: int) -> None:
        """Take note that a layer has been computed, and those before it."""
        if self._running is not None:
            self._running.computed(layer + 1)

    def finish(self) -> None:
        """Return when the blocks of this step are stored, or given up."""
        running, self._running = self._running, None
        if running is None:
            return
        running.computed(self._pages.layout.num_layers)
        if running.has_ended.wait(_BEGIN_S) or (running.has_begun and running.has_ended.wait(_COPY_S)):
            return
        running.give_up()
        self._unfinished = running
        self._resume_s = time.monotonic() + _PAUSE_S

    def close(self) -> None:
        self.finish()
        with self._has_work:
            self._is_closed = True
            self._has_work.notify()

    def _serve(self) -> None:
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: self._work is not None or self._is_closed)
                work, self._work = self._work, None
            if work is None:
                return
            try:
                self._store(work)
            finally:
                work.has_ended.set()

    def _store(self, work: _Running) -> None:
        try:
            self._pool.put_layers([block.key for block in work.blocks], work.copy, _ROOM_S)
        except _GivenUpError:
            log.info("%d blocks were not stored: the pool was too slow", len(work.blocks))
        except MooncakeError as error:
            log.info("%d blocks were not stored: %s", len(work.blocks), error)
            self._resume_s = time.monotonic() + _PAUSE_S
