"""The fetches of one session: blocks that reservations get from other pools.

Owns: which fetches run, at most one for each reservation. Does not know: calls, how blocks travel.
"""

import asyncio
from collections.abc import Callable

from kvstore.pool.claims import PageReservation
from kvstore.protocol.answers import Answer, CallFailed, Fetched, LayersFetched
from kvstore.protocol.calls import FetchBlocks
from kvstore.server.store import Store
from kvstore.transfer.fetches import BlockFetch
from mooncake.errors import MooncakeError, PoolError


class SessionFetches:
    """The fetches of one session, by reservation.

    Args:
        store: The store of the blocks.
        tasks: The task group of the session.
        send: Sends the user a message that says how many layers have arrived.
        wake: Wakes the sends of a reservation when layers have arrived.
    """

    def __init__(
        self,
        store: Store,
        tasks: asyncio.TaskGroup,
        send: Callable[[LayersFetched], None],
        wake: Callable[[int], None],
    ) -> None:
        self._store, self._tasks = store, tasks
        self._send, self._wake = send, wake
        self._running: dict[int, BlockFetch] = {}

    def begin(self, call: FetchBlocks, reservation: PageReservation) -> BlockFetch:
        """Return a fetch for `run`. Raises PoolError if the reservation's blocks cannot be fetched now."""
        if call.reservation_id in self._running:
            raise PoolError(f"reservation {call.reservation_id} is being fetched already")

        def on_layers(num_blocks: int, num_layers: int) -> None:
            self._send(LayersFetched(call.call_id, num_blocks, num_layers))
            self._wake(call.reservation_id)

        store = self._store
        fetch = BlockFetch(store.pool, store.segment, store.peers, reservation, call.blocks, on_layers)
        if any(store.grants.is_granted(reservation, reservation.blocks[i].page) for i in call.blocks):
            raise PoolError(f"reservation {call.reservation_id} has been granted, others write to it")
        self._running[call.reservation_id] = fetch
        return fetch

    async def run(self, call: FetchBlocks, fetch: BlockFetch) -> Answer:
        """Run a fetch to its end, and return the answer to its call."""
        try:
            await fetch.run(call.sources, self._tasks, call.urgency)
        except MooncakeError as error:
            return CallFailed.of(call.call_id, error)
        finally:
            del self._running[call.reservation_id]
        num_layers = [block.arrived.bit_length() for block in fetch.blocks]
        return Fetched(call.call_id, num_layers, [block.page for block in fetch.blocks])

    def runs(self, reservation_id: int) -> bool:
        """Return whether a reservation is being fetched."""
        return reservation_id in self._running

    def writes(self, reservation_id: int, page: int) -> bool:
        """Return whether the fetch of a reservation writes this page."""
        fetch = self._running.get(reservation_id)
        return fetch is not None and fetch.writes(page)

    def stop(self, reservation_id: int) -> None:
        """Stop the fetch of a reservation, if there is one."""
        if reservation_id in self._running:
            self._running[reservation_id].stop()
