"""Prefill: compute what the pool does not hold, store it layer by layer, stream it to the decode side.

One prompt after the other, in order of arrival (Mooncake, section 3, steps 1 to 3).

Owns: prefill jobs. Does not know: who decides, how bytes travel.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

import torch

from kvstore.messages import Reservation
from kvstore.worker_client import WorkerClient
from mooncake.errors import MooncakeError
from mooncake.messages import Prefill, Prefilled, WorkFailed
from workers.engine.batch import Chunk
from workers.engine.kvcache import OutOfPages
from workers.executor import BlockCopy, Executor, draw
from workers.jobs import Jobs
from workers.pool_view import PoolView
from workers.reserving import reserve_prompt

log = logging.getLogger(__name__)
Send = Callable[[Prefilled | WorkFailed], Awaitable[None]]


class PrefillRunner:
    """Takes `Prefill` orders and answers each with `Prefilled` or `WorkFailed`."""

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        view: PoolView,
        prefill_chunk: int,
        send: Send,
        jobs: Jobs,
    ) -> None:
        self._executor, self._pool, self._view = executor, pool, view
        self._prefill_chunk = prefill_chunk
        self._send = send
        self._jobs = jobs
        self._turn = asyncio.Lock()  # first come, first served
        self.num_waiting = 0
        """prompts that have not left yet, the running one included"""

    def start(self, order: Prefill) -> None:
        """Queue a prompt. `Jobs.cancel` stops it between two layers and gives everything back."""
        self._jobs.start(order.ref, self._serve(order))

    async def _serve(self, order: Prefill) -> None:
        self.num_waiting += 1
        try:
            if self._turn.locked():  # time enough to bring from SSD what it has
                await self._pool.prefetch(order.request.block_keys)
            async with self._turn:
                reservation = await reserve_prompt(self._pool, order.request, self._executor.kv.page_size)
                try:
                    await self._pool.send(reservation.reservation_id, order.grant, order.ref.request_id)
                    prefilled = await self._compute(order, reservation)
                except BaseException:
                    await self._pool.release(reservation.reservation_id)
                    raise
            try:
                await self._send(prefilled)
                await self._pool.wait_sent(reservation.reservation_id)
            finally:
                await self._pool.release(reservation.reservation_id)
        except (MooncakeError, OutOfPages) as error:
            if self._pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("prefill of %s failed: %s", order.ref.request_id, error)
            await self._send(WorkFailed(order.ref, str(error), retryable=True))
        finally:
            self.num_waiting -= 1

    async def _compute(self, order: Prefill, reservation: Reservation) -> Prefilled:
        stop = threading.Event()
        loop = asyncio.get_running_loop()

        def on_layer_stored(layer: int, pages: list[int], checksums: list[int]) -> None:
            columns = [[checksum] for checksum in checksums]
            commit = self._pool.commit(reservation.reservation_id, range(layer, layer + 1), pages, columns)
            asyncio.run_coroutine_threadsafe(commit, loop).result()

        device_pages = self._executor.kv.allocate(len(reservation.blocks))
        try:
            first_token, num_cached_tokens = await self._executor.run(
                lambda: self._prefill_on_device(order, reservation, device_pages, on_layer_stored, stop),
                on_cancel=stop.set,
            )
        finally:
            self._executor.kv.free(device_pages)
        return Prefilled(order.ref, first_token, num_cached_tokens)

    def _prefill_on_device(
        self,
        order: Prefill,
        reservation: Reservation,
        device_pages: list[int],
        on_layer_stored: Callable[[int, list[int], list[int]], None],
        stop: threading.Event,
    ) -> tuple[int, int]:
        """The first token, and how many prompt tokens came from the pool."""
        tokens, page_size = order.request.token_ids, self._executor.kv.page_size
        copies = [
            BlockCopy(device_page, block.page)
            for device_page, block in zip(device_pages, reservation.blocks, strict=True)
        ]
        num_cached_blocks = num_leading_sealed_blocks(reservation)
        if num_cached_blocks:
            self._executor.load_blocks(copies[:num_cached_blocks], self._view)
        # At least one token is computed: its logits are the answer's first token.
        num_cached_tokens = min(num_cached_blocks * page_size, len(tokens) - 1)
        logits = torch.empty(0)
        start = num_cached_tokens
        while start < len(tokens):
            end = min(start + self._prefill_chunk, len(tokens))
            last_block = len(copies) if end == len(tokens) else end // page_size
            stores = [
                copies[index]
                for index in range(start // page_size, last_block)
                if not reservation.blocks[index].sealed
            ]
            chunk = Chunk(tokens[start:end], start, device_pages)
            logits = self._executor.prefill_chunk(chunk, stores, self._view, on_layer_stored, stop)
            start = end
        return draw(logits, [order.request.sampling], [len(tokens)])[0], num_cached_tokens


def num_leading_sealed_blocks(reservation: Reservation) -> int:
    """Blocks of the longest prefix that the pool holds: what prefill need not compute."""
    for index, block in enumerate(reservation.blocks):
        if not block.sealed:
            return index
    return len(reservation.blocks)
