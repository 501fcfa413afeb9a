"""The worker's end of its messenger: the pool as an asyncio client, and the segment mapped beside it.

A lost messenger is not hidden: pending calls raise PoolError, `closed` is set, and the worker connects
again with a new client. Before that it must have stopped writing to pages it had reserved through the
old one: the new messenger has freed them.

Owns: the connection of one worker. Does not know: what the worker computes.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Sequence

import msgspec
import numpy as np

from kvstore.answers import (
    Answer,
    Attached,
    CallFailed,
    Count,
    Detached,
    ErrorKind,
    Fetched,
    FromPool,
    Granted,
    LayersFetched,
    Reservation,
    Stats,
    Verified,
)
from kvstore.calls import (
    Attach,
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Call,
    Commit,
    DescribeTokens,
    DropIdle,
    FetchBlocks,
    GetStats,
    Lookup,
    Notice,
    OpenGrant,
    PinBlocks,
    Prefetch,
    Release,
    ReservePages,
    StartSend,
    StopFetch,
    UnpinBlocks,
    VerifyBlocks,
    Waiting,
)
from kvstore.channel import Channel
from kvstore.failures import error_of
from kvstore.segment import Segment
from messenger.checksums import CHECKSUM_BYTES
from messenger.requests import Urgency
from mooncake.blocks import BlockKey, KVLayout
from mooncake.errors import PoolError
from mooncake.pools import (
    Grant,
    PoolShard,
    PoolStats,
)

_ADVICE = "this worker and its messenger's pool must agree"
_DECODER = msgspec.msgpack.Decoder(FromPool)
_SERIAL = 0
"""A process has at most one worker; its clients are numbered from 1."""
_ANSWER_TIMEOUT_S = 10.0
"""for calls that a working messenger answers at once"""
_TOKEN_BYTES = 1 << 17
"""token ids in one message; more are split"""
_COMMIT_BYTES = 1 << 17
"""checksums in one commit message; larger commits are split"""


class WorkerClient:
    """One attached worker. Made by `connect`, ended by `close` or by the messenger's end."""

    def __init__(
        self, channel: "Channel[FromPool]", instance: str, attached: Attached, segment: Segment
    ) -> None:
        self.address = attached.address
        self.wants_token_ids = attached.wants_token_ids
        """whether `describe_tokens` serves anybody"""
        self.segment = segment
        self.closed = asyncio.Event()
        """set when the messenger is gone or has ended the session"""
        self._channel = channel
        self._instance = instance
        self._gone_reason = f"messenger of {instance} gone"
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._on_layers: dict[int, Callable[[int, int], None]] = {}
        """of fetches, by call"""
        self._has_ended = False
        self._space_epoch = 0
        self._background: set[asyncio.Task[Answer]] = set()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        socket_path: str,
        *,
        instance: str,
        incarnation: int,
        fingerprint: str,
        layout: KVLayout,
        timeout_s: float = 10.0,
    ) -> "WorkerClient":
        """Attaches to the messenger at `socket_path`, waiting until it listens.

        Raises MismatchError if its pool belongs to another model or layout, PoolError if it does not
        answer within `timeout_s` or serves a live worker already.
        """
        try:
            async with asyncio.timeout(timeout_s):
                channel = await Channel.connect(socket_path, _DECODER)
                try:
                    await channel.send(Attach(0, instance, incarnation, fingerprint, layout, _SERIAL))
                    answer, fd = await channel.receive_with_fd()
                    if isinstance(answer, CallFailed):
                        raise error_of(answer, _ADVICE)
                    if not isinstance(answer, Attached) or fd is None:
                        raise PoolError(f"messenger of {instance} gone before it answered")
                    segment = _open_segment(fd)
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError:
            raise PoolError(f"no messenger of {instance} at {socket_path} within {timeout_s} s") from None
        except ConnectionError as error:
            raise PoolError(f"messenger of {instance} gone before it answered: {error}") from error
        return cls(channel, instance, answer, segment)

    @property
    def num_pages(self) -> int:
        return self.segment.num_pages

    # -- pages ------------------------------------------------------------------------------------

    async def reserve(self, keys: Sequence[BlockKey], num_private: int) -> Reservation:
        """Leases the sealed blocks among `keys` and reserves pages for the others and `num_private` more.

        All or nothing. Raises PoolFullError if there is no room now (see `wait_for_space`), PoolError
        if there never will be. Cancelled, it leaves nothing reserved.
        """
        reserving = self._spawn(self._call(ReservePages(next(self._call_ids), list(keys), num_private)))
        try:
            answer = await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(self._give_back)
            raise
        assert isinstance(answer, Reservation)
        return answer

    async def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks will be reserved soon: what SSD has of them begins to come to DRAM."""
        await self._send(Prefetch(list(keys)))

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Keeps those of `keys` that are here for `ttl_s`, as long as others can be evicted. How many."""
        answer = await self._call(PinBlocks(next(self._call_ids), list(keys), ttl_s, hard=False))
        assert isinstance(answer, Count)
        return answer.num_blocks

    async def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Those of `keys` that `pin` keeps may be evicted like others again; hard pins are of others."""
        await self._call(UnpinBlocks(next(self._call_ids), list(keys), hard=False))

    async def drop_idle(self, keys: Sequence[BlockKey]) -> None:
        """Forgets those of `keys` that nobody uses and no pin keeps, in every tier."""
        await self._send(DropIdle(list(keys)))

    async def describe_tokens(self, reservation_id: int, token_ids: Sequence[int]) -> None:
        """What the keys of a reservation stand for, for the events of blocks that are still to be sealed.

        Not for prompts with a `cache_salt`: who hears the events could not tell them from others.
        """
        block_size = self.segment.layout.block_size
        num_blocks = len(token_ids) // block_size
        blocks_per_message = max(1, _TOKEN_BYTES // (4 * block_size))
        for first in range(0, num_blocks, blocks_per_message):
            end = min(first + blocks_per_message, num_blocks)
            packed = np.asarray(token_ids[first * block_size : end * block_size], "<u4").tobytes()
            await self._send(DescribeTokens(reservation_id, first, packed))

    async def wait_for_space(self) -> None:
        """Returns when pages have become free or evictable since the last PoolFullError."""
        await self._call(AwaitSpace(next(self._call_ids), self._space_epoch))

    async def commit(
        self, reservation_id: int, layers: range, pages: Sequence[int], checksums: Sequence[Sequence[int]]
    ) -> None:
        """The worker has written `layers` of `pages`: `checksums[i][j]` is the xxh3-64 of layer `layers[j]`
        of `pages[i]` (`xxhash.xxh3_64_intdigest`). Each layer of a page is committed once.

        Returns when the message has left. A wrong commit ends the session (`closed`); one for a released
        reservation is ignored.
        """
        pages_per_message = max(1, _COMMIT_BYTES // (CHECKSUM_BYTES * max(1, len(layers))))
        for start in range(0, len(pages), pages_per_message):
            part = slice(start, start + pages_per_message)
            packed = np.asarray(checksums[part], dtype="<u8").tobytes()
            await self._send(Commit(reservation_id, layers.start, layers.stop, list(pages[part]), packed))

    async def settled(self) -> None:
        """Returns when all commits before it have been taken note of: checksums are in the segment."""
        await self._call(Lookup(next(self._call_ids), []))

    async def release(self, reservation_id: int) -> None:
        """Gives everything of a reservation back: cancels its send, revokes its grant. Idempotent.

        A messenger that is gone has released everything.
        """
        try:
            await self._call(Release(next(self._call_ids), reservation_id))
        except PoolError:
            if not self.closed.is_set():
                raise

    # -- transfers --------------------------------------------------------------------------------

    async def grant(self, reservation_id: int) -> Grant:
        """Decode: opens the unsealed pages of this reservation to remote writes."""
        answer = await self._call(OpenGrant(next(self._call_ids), reservation_id))
        assert isinstance(answer, Granted)
        return answer.grant

    async def send(self, reservation_id: int, grant: Grant, ref_text: str) -> None:
        """Prefill: starts to stream the granted blocks of this reservation to `grant.messenger`, and those of
        `grant.others` to theirs.

        Blocks that are sealed go at once, other layers as they are committed. `ref_text` names the
        request in logs.
        """
        await self._call(StartSend(next(self._call_ids), reservation_id, grant, ref_text))

    async def wait_sent(self, reservation_id: int) -> None:
        """Returns when the receiver has verified and acknowledged everything; TransferError otherwise."""
        await self._call(AwaitSent(next(self._call_ids), reservation_id))

    async def fetch(
        self,
        reservation_id: int,
        sources: Sequence[PoolShard],
        blocks: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> tuple[list[int], list[int]]:
        """Prefill: brings `blocks` (indices) of this reservation from the pools of `sources`, layer by layer.

        `on_layers(num_blocks, num_layers)`: so many layers of the first so many of them are there; it is also
        called, several times a second, while a part of the next ones comes.

        Returns of each block how many layers have come, and its page, which may be another than before. Until
        then only blocks that have been given up are the caller's to write. Whatever becomes of `sources` is
        no error.
        """
        call = FetchBlocks(next(self._call_ids), reservation_id, list(sources), list(blocks))
        self._on_layers[call.call_id] = on_layers
        try:
            answer = await self._call(call)
        finally:
            del self._on_layers[call.call_id]
        assert isinstance(answer, Fetched)
        return answer.num_layers, answer.pages

    async def fetch_ahead(
        self, reservation_id: int, sources: Sequence[PoolShard], blocks: Sequence[int]
    ) -> None:
        """As `fetch`, for nobody who waits: behind the transfers that somebody waits for."""
        call_id = next(self._call_ids)
        await self._call(FetchBlocks(call_id, reservation_id, list(sources), list(blocks), Urgency.BULK))

    async def stop_fetch(self, reservation_id: int) -> None:
        """Ends the fetch of this reservation early, if there is one."""
        await self._send(StopFetch(reservation_id))

    async def verify(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Compares these blocks with their checksums, in every tier. Returns those that had to be dropped."""
        answer = await self._call(VerifyBlocks(next(self._call_ids), list(keys)))
        assert isinstance(answer, Verified)
        return answer.damaged

    async def wait_arrived(self, reservation_id: int) -> None:
        """Decode: returns when all granted pages are complete and verified.

        Raises TransferError if a sender's connection was lost, sent damaged bytes or gave up before.
        A sender that never connects is not noticed here: the caller has a deadline.
        """
        await self._call(AwaitArrived(next(self._call_ids), reservation_id))

    # -- the rest ---------------------------------------------------------------------------------

    async def stats(self, check_integrity: bool = False) -> PoolStats:
        """Counters; `check_integrity` also looks at every page, which takes time in a large pool."""
        answer = await self._call(GetStats(next(self._call_ids), check_integrity))
        assert isinstance(answer, Stats)
        return answer.stats

    async def close(self) -> None:
        """Detaches: the messenger releases all that this worker had reserved."""
        self._gone_reason = f"client of {self._instance} closed"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._end()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.segment.close()

    def _spawn(self, work: Coroutine[None, None, Answer]) -> "asyncio.Task[Answer]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _give_back(self, reserving: "asyncio.Task[Answer]") -> None:
        """A reservation whose caller was cancelled has come."""
        if reserving.cancelled() or reserving.exception() is not None:
            return
        answer = reserving.result()
        assert isinstance(answer, Reservation)
        releasing = self._spawn(self._call(Release(next(self._call_ids), answer.reservation_id)))
        releasing.add_done_callback(lambda task: task.cancelled() or task.exception())  # gone: released too

    async def _send(self, message: Call | Notice) -> None:
        if self.closed.is_set():
            raise PoolError(self._gone_reason)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._channel.send(message)
        except ConnectionError as error:
            raise PoolError(self._gone_reason) from error
        except TimeoutError:
            raise self._stalled() from None

    async def _call(self, call: Call) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = answered
        try:
            await self._send(call)
            waits = isinstance(call, Waiting | PinBlocks)  # what is pinned comes from disk first
            async with asyncio.timeout(None if waits else _ANSWER_TIMEOUT_S):
                answer = await answered
        except TimeoutError:
            raise self._stalled() from None
        finally:
            del self._calls[call.call_id]
        if isinstance(answer, CallFailed):
            if answer.kind is ErrorKind.POOL_FULL:
                self._space_epoch = answer.space_epoch
            raise error_of(answer, _ADVICE)
        return answer

    async def _read(self) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, Detached):
                    self._gone_reason = f"messenger of {self._instance} ended the session: {message.reason}"
                    break
                if isinstance(message, LayersFetched):
                    on_layers = self._on_layers.get(message.call_id)
                    if on_layers is not None:
                        on_layers(message.num_blocks, message.num_layers)
                    continue
                answered = self._calls.get(message.call_id)
                if answered is not None and not answered.done():  # else its caller was cancelled
                    answered.set_result(message)
        finally:
            self._end()

    def _stalled(self) -> PoolError:
        """A messenger that does not answer is as good as gone: what it holds for this worker must end."""
        self._gone_reason = f"messenger of {self._instance} did not answer within {_ANSWER_TIMEOUT_S:g} s"
        self.closed.set()
        self._reader.cancel()  # which ends the rest
        return PoolError(self._gone_reason)

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.closed.set()
        self._channel.close()
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(PoolError(self._gone_reason))
                answered.exception()  # retrieved, should its caller be gone


def _open_segment(fd: int) -> Segment:
    try:
        segment = Segment.open(fd)
    finally:
        os.close(fd)  # the mapping stays
    assert segment is not None, "a messenger formats before it answers"
    return segment
