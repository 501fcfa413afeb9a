"""Decode: reserve pages, wait for the KVCache, then continuous batching (Mooncake, section 3, step 4).

Owns: decode jobs and the running batch. Does not know: who decides, how bytes travel.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from kvstore.messages import Reservation
from kvstore.worker_client import WorkerClient
from mooncake.errors import MooncakeError, TransferError
from mooncake.messages import Decode, Finished, Ref, Reserve, Reserved, TokenOutput, WorkFailed
from workers.engine.batch import Chunk
from workers.engine.kvcache import OutOfPages
from workers.executor import Executor
from workers.jobs import Jobs
from workers.pool_view import PoolView
from workers.reserving import reserve_prompt
from workers.sequence import Place, Sequence

log = logging.getLogger(__name__)
Send = Callable[[Reserved | Finished | WorkFailed], Awaitable[None]]
Emit = Callable[[list[tuple[str, TokenOutput]]], Awaitable[None]]


class DecodeRunner:
    """Answers `Reserve` with `Reserved`; after `Decode` it emits tokens, then says `Finished`.

    `emit` takes pairs of (front's endpoint, output) of one iteration.
    """

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        view: PoolView,
        max_batch: int,
        arrival_timeout_s: float,
        send: Send,
        emit: Emit,
        jobs: Jobs,
    ) -> None:
        self._executor, self._pool, self._view = executor, pool, view
        self._max_batch = max_batch
        self._arrival_timeout_s = arrival_timeout_s
        self._send, self._emit = send, emit
        self._jobs = jobs
        self._reserving = asyncio.Lock()  # first come, first served
        self._orders: dict[Ref, asyncio.Future[Decode]] = {}
        self._joining: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._wake = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch."""
        return len(self._orders) - len(self._running)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def reserve(self, order: Reserve) -> None:
        """Take on a request: first its pages. `Jobs.cancel` stops it before the next iteration."""
        self._jobs.start(order.ref, self._serve(order))

    def decode(self, order: Decode) -> None:
        """Prefill of a reserved request is done. Unknown work has just been aborted."""
        future = self._orders.get(order.ref)
        if future is not None and not future.done():
            future.set_result(order)

    async def run(self) -> None:
        """The loop: admit, make room, compute, emit."""
        try:
            while True:
                if not self._running and not self._joining:
                    self._wake.clear()
                    await self._wake.wait()
                await self._admit()
                await self._make_room()
                await self._step()
        finally:
            for sequence in self._running:
                self._free(sequence)

    # -- one request --------------------------------------------------------------------------------

    async def _serve(self, order: Reserve) -> None:
        ref = order.ref
        self._orders[ref] = asyncio.get_running_loop().create_future()
        try:
            reservation = await self._reserve_pages(order)
            try:
                await self._send(Reserved(ref, await self._pool.grant(reservation.reservation_id)))
                sequence = self._sequence(order, reservation, await self._orders[ref])
                await self._emit([output_of(sequence)])
                await self._wait_arrived(reservation)
                if sequence.finish_reason is None:
                    self._join(sequence)
                    await sequence.loaded.wait()
            except asyncio.CancelledError:
                self._forget(ref)
                raise
            finally:
                await self._pool.release(reservation.reservation_id)
            if sequence.finish_reason is None:
                await sequence.done.wait()
            if sequence.error is not None:
                raise sequence.error
            assert sequence.finish_reason is not None
            await self._send(Finished(ref, sequence.finish_reason, sequence.num_output_tokens))
        except asyncio.CancelledError:
            self._forget(ref)
            raise
        except (MooncakeError, OutOfPages) as error:
            if self._pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("decode of %s failed: %s", ref.request_id, error)
            await self._send(WorkFailed(ref, str(error), retryable=not isinstance(error, OutOfPages)))
        finally:
            del self._orders[ref]

    async def _reserve_pages(self, order: Reserve) -> Reservation:
        async with self._reserving:
            return await reserve_prompt(self._pool, order.request, self._executor.kv.page_size)

    async def _wait_arrived(self, reservation: Reservation) -> None:
        """Prefill has ended, so the KVCache is on its way, unless its sender was lost before it connected."""
        try:
            async with asyncio.timeout(self._arrival_timeout_s):
                await self._pool.wait_arrived(reservation.reservation_id)
        except TimeoutError:
            raise TransferError(f"the KVCache did not arrive within {self._arrival_timeout_s:g} s") from None

    def _sequence(self, reserve: Reserve, reservation: Reservation, decode: Decode) -> Sequence:
        tokens = [*reserve.request.token_ids, decode.first_token]
        return Sequence(reserve.ref, reserve.request, reservation, decode.num_cached_tokens, tokens)

    # -- the batch ----------------------------------------------------------------------------------

    def _join(self, sequence: Sequence) -> None:
        self._joining.append(sequence)
        self._wake.set()

    def _forget(self, ref: Ref) -> None:
        """Take an aborted sequence out, wherever it is. The loop may be computing with it: see `_step`."""
        for sequence in [*self._running, *self._joining]:
            if sequence.ref == ref:
                sequence.done.set()

    async def _admit(self) -> None:
        """Load waiting sequences in order while batch and pages allow it. One page is left to grow."""
        kv = self._executor.kv
        while self._joining and len(self._running) < self._max_batch:
            sequence = self._joining[0]
            if sequence.done.is_set():
                self._joining.popleft()
                continue
            num_pages = sequence.num_pages_needed(kv.page_size)
            if self._running and kv.num_free_pages < num_pages + 1:
                return
            self._joining.popleft()
            if kv.num_free_pages < num_pages:
                self._fail(sequence, OutOfPages(num_pages, kv.num_free_pages, kv.num_pages))
                continue
            sequence.pages = kv.allocate(num_pages)
            self._running.append(sequence)
            await self._load(sequence)
            sequence.place = Place.DEVICE

    async def _load(self, sequence: Sequence) -> None:
        if sequence.place is Place.POOL:
            pool_pages = [block.page for block in sequence.reservation.blocks]
            device_pages = sequence.pages[: len(pool_pages)]
            await self._executor.run(lambda: self._executor.load_blocks(device_pages, pool_pages, self._view))
            sequence.loaded.set()
        else:
            pages = sequence.pages[: len(sequence.saved[0])]
            await self._executor.run(lambda: self._executor.restore_pages(pages, sequence.saved))
            sequence.saved = []

    async def _make_room(self) -> None:
        """Give every running sequence its page for the next token; preempt the newest when none is left."""
        self._drop_done()
        kv = self._executor.kv
        for sequence in list(self._running):
            while sequence in self._running and len(sequence.pages) < sequence.num_pages_needed(kv.page_size):
                if kv.num_free_pages:
                    sequence.pages += kv.allocate(1)
                elif len(self._running) > 1:
                    await self._preempt(self._running[-1])
                else:
                    self._fail(sequence, OutOfPages(len(sequence.pages) + 1, 0, kv.num_pages))

    async def _preempt(self, sequence: Sequence) -> None:
        pages = sequence.pages[: -(-sequence.num_kv_tokens // self._executor.kv.page_size)]
        sequence.saved = await self._executor.run(lambda: self._executor.save_pages(pages))
        self._running.remove(sequence)
        self._free(sequence)
        sequence.place = Place.HOST
        self._joining.appendleft(sequence)

    def _fail(self, sequence: Sequence, error: OutOfPages) -> None:
        sequence.error = error
        sequence.loaded.set()
        sequence.done.set()
        self._drop_done()

    async def _step(self) -> None:
        batch = list(self._running)
        if not batch:
            return
        chunks = [Chunk(sequence.tokens[-1:], sequence.num_kv_tokens, sequence.pages) for sequence in batch]
        sampling = [sequence.request.sampling for sequence in batch]
        tokens = await self._executor.run(lambda: self._executor.decode(chunks, sampling))
        outputs = []
        for sequence, token in zip(batch, tokens, strict=True):
            if sequence.done.is_set():
                continue  # aborted while this iteration ran
            sequence.tokens.append(token)
            outputs.append(output_of(sequence))
            if sequence.finish_reason is not None:
                sequence.done.set()
        self._drop_done()
        await self._emit(outputs)

    def _drop_done(self) -> None:
        for sequence in [sequence for sequence in self._running if sequence.done.is_set()]:
            self._running.remove(sequence)
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._executor.kv.free(sequence.pages)
        sequence.pages = []


def output_of(sequence: Sequence) -> tuple[str, TokenOutput]:
    """The newest token, addressed to the request's front."""
    output = TokenOutput(
        sequence.ref,
        sequence.num_output_tokens - 1,
        sequence.tokens[-1:],
        sequence.num_cached_tokens,
        sequence.finish_reason,
    )
    return sequence.request.reply_to, output
