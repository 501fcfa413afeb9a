"""A worker's session: what an attached worker asks of its part of the pool.

The session ends when the worker's socket closes, and with it every reservation, send and grant of that
worker. Calls that wait (for space, for a transfer) are tasks of the session; all others are answered at
once and in order.

Owns: one session. Does not know: how workers attach.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from kvstore.channel import Channel
from kvstore.grants import Grants
from kvstore.messages import (
    Answer,
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Call,
    CallFailed,
    Commit,
    Detached,
    Done,
    ErrorKind,
    FromWorker,
    GetStats,
    Granted,
    OpenGrant,
    Release,
    ReservedBlock,
    ReservePages,
    StartSend,
    Stats,
)
from kvstore.messages import Reservation as ReservationAnswer
from kvstore.pages import PageState
from kvstore.pool import Pool, Reservation, layer_mask
from kvstore.segment import Segment
from kvstore.sends import Send
from messenger.identity import Identity
from messenger.protocol import CHECKSUM_BYTES
from messenger.sender import Links
from messenger.transports import Traffic, Transport
from mooncake.blocks import KEY_BYTES
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError, PoolFullError, TransferError
from mooncake.messages import PoolStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """An instance's opened part of the pool: one segment and all that works on it."""

    identity: Identity
    segment: Segment
    pool: Pool
    grants: Grants
    links: Links
    traffic: Traffic
    space: asyncio.Event
    """set whenever a page becomes free or evictable"""


class WorkerSession:
    """Serves one worker until its socket closes."""

    def __init__(
        self,
        owner: int,
        incarnation: int,
        channel: Channel[FromWorker],
        store: Store,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.incarnation = incarnation
        self.channel = channel
        self._owner = owner
        self._store = store
        self._tasks = tasks
        self._waiting: set[asyncio.Task[None]] = set()
        self._sends: dict[int, tuple[Send, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        try:
            while (message := await self.channel.receive()) is not None:
                if isinstance(message, Commit):
                    self._commit(message)
                elif isinstance(message, AwaitSpace | AwaitSent | AwaitArrived):
                    self._spawn(self._answer(message))
                else:
                    await self._answer(message)
        except PoolError as error:
            log.error("the worker's session is ended: %s", error)
            with contextlib.suppress(ConnectionError):
                await self.channel.send(Detached(str(error)))
        finally:
            self._end()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _end(self) -> None:
        for task in self._waiting:
            task.cancel()
        for reservation_id in list(self._sends):
            self._cancel_send(reservation_id)
        for reservation_id in self._store.pool.reservations_of(self._owner):
            self._release(reservation_id, "its worker is gone")

    async def _answer(self, call: Call) -> None:
        try:
            answer = await self._perform(call)
        except MooncakeError as error:
            answer = failed_call(call.call_id, error, self._store.pool.space_epoch)
        with contextlib.suppress(ConnectionError):  # the worker is gone, as `run` will see
            try:
                await self.channel.send(answer)
            except PoolError as error:
                await self.channel.send(failed_call(call.call_id, error))

    async def _perform(self, call: Call) -> Answer:
        match call:
            case ReservePages(call_id, keys, num_private):
                return self._reserve(call_id, keys, num_private)
            case OpenGrant(call_id, reservation_id):
                return Granted(call_id, self._store.grants.grant(self._find(reservation_id)))
            case StartSend():
                self._start_send(call)
            case Release(_, reservation_id):
                self._release(reservation_id, "the receiver released its reservation")
            case AwaitSpace(_, space_epoch):
                while self._store.pool.space_epoch <= space_epoch:
                    self._store.space.clear()
                    await self._store.space.wait()
            case AwaitSent(_, reservation_id):
                await asyncio.shield(self._find_send(reservation_id).outcome)
            case AwaitArrived(_, reservation_id):
                await self._store.grants.wait_arrived(self._find(reservation_id))
            case GetStats(call_id, check_integrity):
                return Stats(call_id, self._stats(check_integrity))
            case _:
                raise PoolError("this connection is attached already")
        return Done(call.call_id)

    def _reserve(self, call_id: int, keys: list[bytes], num_private: int) -> ReservationAnswer:
        if num_private < 0 or any(len(key) != KEY_BYTES for key in keys):
            raise PoolError(f"a reservation needs keys of {KEY_BYTES} bytes and num_private >= 0")
        reservation = self._store.pool.reserve(self._owner, keys, num_private)
        blocks = [ReservedBlock(b.page, b.generation, b.found) for b in reservation.blocks]
        return ReservationAnswer(call_id, reservation.reservation_id, blocks)

    def _commit(self, commit: Commit) -> None:
        """Raises PoolError for a commit that no correct worker sends."""
        reservation = self._store.pool.find(commit.reservation_id)
        if reservation is None or reservation.owner != self._owner:
            return  # released while the commit was on its way
        layers = range(commit.layer_begin, commit.layer_end)
        stride = len(layers) * CHECKSUM_BYTES
        if not 0 <= layers.start < layers.stop <= self._store.segment.layout.num_layers:
            raise PoolError(f"a commit names layers [{layers.start}, {layers.stop})")
        if len(commit.checksums) != stride * len(commit.pages):
            raise PoolError(f"{len(commit.pages)} pages came with {len(commit.checksums)} bytes of checksums")
        for position, page in enumerate(commit.pages):
            block = reservation.by_page.get(page)
            if block is None or self._store.grants.is_granted(reservation, page):
                raise PoolError(f"page {page} is not the worker's to write in {commit.reservation_id}")
            if block.arrived & layer_mask(layers):
                raise PoolError(f"layers [{layers.start}, {layers.stop}) of page {page} were there already")
            checksums = commit.checksums[position * stride : (position + 1) * stride]
            self._store.pool.arrived(reservation, block, layers, checksums)
        if commit.reservation_id in self._sends:
            self._sends[commit.reservation_id][0].wake()

    def _start_send(self, call: StartSend) -> None:
        reservation = self._find(call.reservation_id)
        if call.reservation_id in self._sends:
            raise PoolError(f"reservation {call.reservation_id} is being sent already")
        store = self._store
        send = Send(store.pool, store.segment, store.links, reservation, call.grant, call.ref_text)
        self._sends[call.reservation_id] = (send, self._tasks.create_task(send.run()))

    def _release(self, reservation_id: int, reason: str) -> None:
        reservation = self._store.pool.find(reservation_id)
        if reservation is None or reservation.owner != self._owner:
            return
        self._cancel_send(reservation_id)
        self._store.grants.revoke(reservation_id, reason)
        self._store.pool.release(reservation_id)

    def _cancel_send(self, reservation_id: int) -> None:
        send, task = self._sends.pop(reservation_id, (None, None))
        if send is not None and task is not None:
            task.cancel()
            send.finish(TransferError("released before everything was sent"))

    def _find(self, reservation_id: int) -> Reservation:
        reservation = self._store.pool.find(reservation_id)
        if reservation is None or reservation.owner != self._owner:
            raise PoolError(f"reservation {reservation_id} is unknown or was released")
        return reservation

    def _find_send(self, reservation_id: int) -> Send:
        if reservation_id not in self._sends:
            raise PoolError(f"reservation {reservation_id} is not being sent")
        return self._sends[reservation_id][0]

    def _stats(self, check_integrity: bool) -> PoolStats:
        pool, traffic = self._store.pool, self._store.traffic
        counts = pool.table.count()
        return PoolStats(
            num_pages=pool.table.num_pages,
            num_free=counts[PageState.FREE],
            num_reserved=counts[PageState.RESERVED],
            num_sealed=counts[PageState.SEALED],
            num_quarantined=counts[PageState.QUARANTINED],
            num_used=pool.num_used_pages,
            num_reservations=pool.num_reservations,
            num_hits=pool.counters.num_hits,
            num_misses=pool.counters.num_misses,
            num_evictions=pool.counters.num_evictions,
            num_dropped=pool.counters.num_dropped,
            num_checksum_failures=traffic.num_checksum_failures,
            sent_bytes=by_name(traffic.sent_bytes),
            received_bytes=by_name(traffic.received_bytes),
            integrity=pool.check_integrity() if check_integrity else None,
        )


def by_name(num_bytes: dict[Transport, int]) -> dict[str, int]:
    """Transports by the names that messages carry."""
    return {transport.value: count for transport, count in num_bytes.items()}


def failed_call(call_id: int, error: MooncakeError, space_epoch: int = 0) -> CallFailed:
    """The answer that makes the worker raise `error`."""
    match error:
        case PoolFullError():
            return CallFailed(call_id, ErrorKind.POOL_FULL, str(error), space_epoch=space_epoch)
        case MismatchError():
            mismatch = (error.what, str(error.ours), str(error.theirs))
            return CallFailed(call_id, ErrorKind.MISMATCH, str(error), mismatch=mismatch)
        case TransferError():
            return CallFailed(call_id, ErrorKind.TRANSFER, str(error))
        case ConfigError():
            return CallFailed(call_id, ErrorKind.CONFIG, str(error))
        case _:
            return CallFailed(call_id, ErrorKind.POOL, str(error))
