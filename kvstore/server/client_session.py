"""The session of one worker or client: it handles all of the user's calls to an instance's pool part.

The session ends with the connection. Then all reservations, leases, sends and grants of the user end. Calls
that wait (for space, for a transfer, for a disk) are tasks of the session; all other calls are answered at
once and in order.

Owns: one session. Does not know: how users connect, how messages travel.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from kvstore.events.batches import BlockTokens
from kvstore.pool.claims import PageLease, PageReservation, layer_mask
from kvstore.pool.pages import PageWriter
from kvstore.protocol.answers import (
    LOCATIONS,
    Answer,
    CallFailed,
    Count,
    Done,
    FromPool,
    Granted,
    Leased,
    Located,
    Reservation,
    ReservedBlock,
    Stats,
    Verified,
)
from kvstore.protocol.calls import (
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Call,
    Commit,
    DescribeTokens,
    DeviceBlocks,
    DropIdle,
    EndLease,
    FetchBlocks,
    GetStats,
    LeaseBlocks,
    ListBlocks,
    Lookup,
    OpenGrant,
    PinBlocks,
    Prefetch,
    Release,
    RemoveBlocks,
    ReservePages,
    SealBlocks,
    StartSend,
    StopFetch,
    ToPool,
    UnpinBlocks,
    VerifyBlocks,
)
from kvstore.server.listing import list_blocks, pool_stats, verify_block
from kvstore.server.session_fetches import SessionFetches
from kvstore.server.store import Store
from kvstore.transfer.fetches import BlockFetch
from kvstore.transfer.sends import Sends
from messenger.wire.checksums import CHECKSUM_BYTES
from mooncake.errors import MooncakeError, PoolError, PoolFullError
from mooncake.messages.blocks import KEY_BYTES, BlockKey

log = logging.getLogger(__name__)

_LONGEST_TTL_S = 30 * 24 * 3600.0
"""The longest time to live of a lease or pin, in seconds."""
_MOST_LISTED = 1000
"""The most blocks in one answer to `ListBlocks`."""
_MOST_WAITING = 4096
"""The most calls of one user that may wait at the same time."""


@dataclass(frozen=True, slots=True)
class User:
    """A worker or client. `owner` is the owner of the user's reservations and leases in the pool.

    `writer`: the process that writes the pages that the user reserves; None if the messenger writes them.
    """

    owner: int
    name: str
    writer: PageWriter | None


class ClientSession:
    """The session of one user. The caller must call `end` when the user's connection has ended.

    `send` takes the session's answers and never waits.
    """

    def __init__(
        self, user: User, store: Store, tasks: asyncio.TaskGroup, send: Callable[[FromPool], None]
    ) -> None:
        self.user = user
        self.store = store
        self._pool = store.pool
        self._tasks = tasks
        self._send = send
        self._waiting: set[asyncio.Task[None]] = set()
        self._sends = Sends(store.pool, store.segment, store.peers, tasks)
        self._fetches = SessionFetches(store, tasks, send, self._sends.wake)
        self._has_device = False
        """Whether the user has reported blocks of its engine's prefix cache."""

    def handle(self, message: ToPool) -> None:
        """Handle a message.

        Raises PoolError for a message that no correct user sends; the session must end then.
        """
        match message:
            case Commit():
                self._commit(message)
            case DescribeTokens():
                self._describe(message)
            case EndLease(lease_id):
                self.end_lease(lease_id)
            case Prefetch(keys):
                self.store.mover.prefetch(_checked(keys))
            case DropIdle(keys):
                self.store.drop_idle(_checked(keys))
            case DeviceBlocks(keys, is_stored):
                self._has_device = True
                self.store.device.change(_checked(keys), is_stored=is_stored)
            case StopFetch(reservation_id):
                self._fetches.stop(reservation_id)
            case FetchBlocks():
                self._start_fetch(message)
            case AwaitSpace() | AwaitSent() | AwaitArrived() | VerifyBlocks():
                self._spawn(self._answer_later(message))
            case ReservePages() | LeaseBlocks() | PinBlocks() if self.store.is_on_ssd_only(message.keys):
                self._spawn(self._answer_later(message))
            case _:
                self._answer(message)

    def end(self) -> None:
        """Release everything that this user holds. Idempotent."""
        for task in self._waiting:
            task.cancel()
        self._sends.cancel_all()
        reservations, leases = self._pool.claims_of(self.user.owner)
        for reservation_id in reservations:
            self.release(reservation_id, f"{self.user.name} is gone")
        for lease_id in leases:
            self._pool.end_lease(lease_id)
        if self._has_device:
            self.store.device.clear()

    # -- calls ------------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        try:
            answer = self._perform(call)
        except MooncakeError as error:
            answer = CallFailed.of(call.call_id, error)
        self._reply(answer)

    async def _answer_later(self, call: Call) -> None:
        try:
            answer = await self._perform_later(call)
        except MooncakeError as error:
            answer = CallFailed.of(call.call_id, error)
        self._reply(answer)

    def _reply(self, answer: Answer) -> None:
        try:
            self._send(answer)
        except PoolError as error:  # too large
            self._send(CallFailed.of(answer.call_id, error))

    def _perform(self, call: Call) -> Answer:
        match call:
            case Lookup(call_id, keys):
                located = self._pool.locate(_checked(keys))
                return Located(call_id, bytes(map(LOCATIONS.index, located)))
            case ReservePages(call_id, keys, num_private, tenant):
                return _reserved(call_id, self._reserve(keys, num_private, tenant))
            case LeaseBlocks(call_id, keys, ttl_s):
                lease = self._lease(keys, ttl_s)
                return Leased(call_id, lease.lease_id, lease.pages)
            case PinBlocks(call_id, keys, ttl_s, hard):
                deadline_s = self._deadline_s(ttl_s)
                return Count(call_id, self._pool.pins.add(_checked(keys), hard=hard, deadline_s=deadline_s))
            case UnpinBlocks(call_id, keys, hard):
                return Count(call_id, self._pool.pins.remove(_checked(keys), hard=hard))
            case RemoveBlocks(call_id, keys):
                return Count(call_id, self.store.remove(keys if keys is None else _checked(keys)))
            case ListBlocks(call_id, cursor, max_blocks):
                return list_blocks(self.store, call_id, cursor, min(max_blocks, _MOST_LISTED))
            case SealBlocks():
                self._seal(call)
            case OpenGrant(call_id, reservation_id):
                if self._fetches.runs(reservation_id):
                    raise PoolError(f"reservation {reservation_id} is being fetched, it cannot be granted")
                return Granted(call_id, self.store.grants.grant(self._find(reservation_id)))
            case StartSend():
                self._sends.start(self._find(call.reservation_id), call.grant, call.ref_text)
            case Release(_, reservation_id):
                self.release(reservation_id, "the receiver released its reservation")
            case GetStats(call_id, check_integrity):
                return Stats(call_id, pool_stats(self.store, check_integrity=check_integrity))
            case _:
                raise PoolError("this connection is attached already")
        return Done(call.call_id)

    async def _perform_later(self, call: Call) -> Answer:
        match call:
            case ReservePages(call_id, keys, num_private, tenant):
                return _reserved(call_id, await self.reserve(keys, num_private, tenant))
            case LeaseBlocks(call_id, keys, ttl_s):
                lease = await self.lease(keys, ttl_s)
                return Leased(call_id, lease.lease_id, lease.pages)
            case PinBlocks(_, keys, _, _):
                async with self.store.mover.keep_promoted(_checked(keys), patiently=True):
                    return self._perform(call)
            case VerifyBlocks(call_id, keys):
                distinct = dict.fromkeys(_checked(keys))
                is_intact = {key: await verify_block(self.store, key) for key in distinct}
                damaged = [key for key, intact in is_intact.items() if intact is False]
                return Verified(call_id, sum(map(bool, is_intact.values())), damaged)
            case AwaitSpace(_, space_epoch):
                await self.store.wait_for_space(space_epoch)
            case AwaitSent(_, reservation_id):
                await self._sends.wait(reservation_id)
            case AwaitArrived(_, reservation_id):
                await self.store.grants.wait_arrived(self._find(reservation_id))
            case _:
                raise AssertionError("all other calls are answered at once")
        return Done(call.call_id)

    # -- reservations and leases ------------------------------------------------------------------

    async def reserve(self, keys: Sequence[BlockKey], num_private: int, tenant: str = "") -> PageReservation:
        """Reserve as `Pool.reserve` does, after promoting blocks of the prefix that only SSD has.

        Raises the errors of `Pool.reserve`, and PoolError for an invalid argument. A call that raises
        PoolFullError leaves no page reserved or held.
        """
        if not self.store.is_on_ssd_only(keys):
            return self._reserve(keys, num_private, tenant)
        # A request that cannot be served must not move blocks: that would wake other waiting requests, which
        # would move blocks and wake this one.
        self._pool.check_room(_checked(keys), num_private)
        found_prefix = self.store.found_prefix(keys)
        with contextlib.suppress(PoolFullError):
            async with self.store.mover.keep_promoted(found_prefix, patiently=False):
                return self._reserve(keys, num_private, tenant)
        # The context has released pages of blocks that could not be promoted. Perhaps nothing else ever does.
        return self._reserve(keys, num_private, tenant)

    async def lease(self, keys: Sequence[BlockKey], ttl_s: float) -> PageLease:
        """Lease as `Pool.lease` does, after promoting blocks that only SSD has.

        Raises PoolError for an invalid key or `ttl_s`.
        """
        if not self.store.is_on_ssd_only(keys):
            return self._lease(keys, ttl_s)
        async with self.store.mover.keep_promoted(_checked(keys), patiently=True):
            return self._lease(keys, ttl_s)

    def end_lease(self, lease_id: int) -> None:
        lease = self._pool.leases.get(lease_id)
        if lease is not None and lease.owner == self.user.owner:
            self._pool.end_lease(lease_id)

    def release(self, reservation_id: int, reason: str) -> None:
        """Release a reservation. Its writers are told the `reason`. Idempotent."""
        if self._own(reservation_id) is not None:
            self._sends.cancel(reservation_id)
            self._fetches.stop(reservation_id)
            self.store.grants.revoke(reservation_id, reason)
            self._pool.release(reservation_id)

    def _reserve(self, keys: Sequence[BlockKey], num_private: int, tenant: str) -> PageReservation:
        if num_private < 0:
            raise PoolError(f"num_private is {num_private}, it must not be negative")
        return self._pool.reserve(self.user.owner, _checked(keys), num_private, self.user.writer, tenant)

    def _lease(self, keys: Sequence[BlockKey], ttl_s: float) -> PageLease:
        return self._pool.lease(self.user.owner, _checked(keys), self._deadline_s(ttl_s))

    def _deadline_s(self, ttl_s: float) -> float:
        if not 0 < ttl_s <= _LONGEST_TTL_S:
            raise PoolError(
                f"a time to live of {ttl_s} s; it must be positive and at most {_LONGEST_TTL_S:g}"
            )
        return self.store.now_s() + ttl_s

    def _commit(self, commit: Commit) -> None:
        """Record a commit. Raises PoolError for a commit that no correct user sends."""
        reservation = self._own(commit.reservation_id)
        if reservation is None:
            return  # released while the commit was in flight
        layers = range(commit.layer_begin, commit.layer_end)
        if not 0 <= layers.start < layers.stop <= self.store.segment.layout.num_layers:
            raise PoolError(f"a commit names layers [{layers.start}, {layers.stop})")
        stride = len(layers) * CHECKSUM_BYTES
        if len(commit.checksums) != stride * len(commit.pages):
            raise PoolError(f"{len(commit.pages)} pages came with {len(commit.checksums)} bytes of checksums")
        for position, page in enumerate(commit.pages):
            block = reservation.by_page.get(page)
            if block is None or self._is_written_otherwise(reservation, page):
                raise PoolError(f"page {page} is not the user's to write in {commit.reservation_id}")
            if block.arrived & layer_mask(layers):
                raise PoolError(f"layers [{layers.start}, {layers.stop}) of page {page} were there already")
            checksums = commit.checksums[position * stride : (position + 1) * stride]
            self._pool.record_arrival(block, layers, checksums)
        self._sends.wake(commit.reservation_id)

    def _is_written_otherwise(self, reservation: PageReservation, page: int) -> bool:
        """Return whether other messengers write, or wrote, this page of a reservation."""
        is_fetched = self._fetches.writes(reservation.reservation_id, page)
        return self.store.grants.is_granted(reservation, page) or is_fetched

    def _seal(self, call: SealBlocks) -> None:
        reservation = self._find(call.reservation_id)
        blocks = [block for block in reservation.blocks if not block.found]
        layers = range(self.store.segment.layout.num_layers)
        stride = len(layers) * CHECKSUM_BYTES
        if len(call.checksums) != stride * len(blocks):
            raise PoolError(f"{len(blocks)} pages came with {len(call.checksums)} bytes of checksums")
        for block in blocks:
            if block.arrived or self._is_written_otherwise(reservation, block.page):
                raise PoolError(f"page {block.page} of {call.reservation_id} is being written otherwise")
        for position, block in enumerate(blocks):
            checksums = call.checksums[position * stride : (position + 1) * stride]
            self._pool.record_arrival(block, layers, checksums)
        self.release(call.reservation_id, "its blocks are sealed")

    def _describe(self, described: DescribeTokens) -> None:
        reservation = self._own(described.reservation_id)
        if reservation is None:
            return
        block_size = self.store.segment.layout.block_size
        if len(described.token_ids) % (4 * block_size):
            raise PoolError(f"{len(described.token_ids)} bytes are no token ids of blocks of {block_size}")
        token_ids = memoryview(described.token_ids).cast("I")
        for number in range(len(token_ids) // block_size):
            index = described.first_block + number
            tokens = token_ids[number * block_size : (number + 1) * block_size]
            if not 0 <= index < len(reservation.blocks):
                raise PoolError(f"token ids for block {index} of {len(reservation.blocks)}")
            parent = reservation.blocks[index - 1].key if index else None
            reservation.blocks[index].tokens = BlockTokens(parent, tokens)

    def _find(self, reservation_id: int) -> PageReservation:
        reservation = self._own(reservation_id)
        if reservation is None:
            raise PoolError(f"reservation {reservation_id} is unknown or was released")
        return reservation

    def _own(self, reservation_id: int) -> PageReservation | None:
        """Return the open reservation with this id, if it is this user's; else None."""
        reservation = self._pool.reservations.get(reservation_id)
        return reservation if reservation is not None and reservation.owner == self.user.owner else None

    # -- fetches ----------------------------------------------------------------------------------

    def _start_fetch(self, call: FetchBlocks) -> None:
        """Start a fetch at once, as the next message may stop it."""
        try:
            fetch = self._fetches.begin(call, self._find(call.reservation_id))
        except PoolError as error:
            self._reply(CallFailed.of(call.call_id, error))
            return
        self._spawn(self._run_fetch(call, fetch))

    async def _run_fetch(self, call: FetchBlocks, fetch: BlockFetch) -> None:
        self._reply(await self._fetches.run(call, fetch))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            work.close()
            raise PoolError(f"more than {_MOST_WAITING} calls wait for their answers")
        task = self._tasks.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)


def _checked(keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """Return `keys`. Raises PoolError for an invalid key."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise PoolError(f"a key of {len(key)} bytes; keys have {KEY_BYTES}")
    return keys


def _reserved(call_id: int, reservation: PageReservation) -> Reservation:
    blocks = [ReservedBlock(b.page, b.generation, b.found, b.tier) for b in reservation.blocks]
    return Reservation(call_id, reservation.reservation_id, blocks)
