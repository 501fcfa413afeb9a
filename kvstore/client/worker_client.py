"""The worker's end of its messenger: the pool as an asyncio client, and the segment mapped beside it.

A lost messenger is not hidden: pending calls raise PoolError, `closed` is set, and the worker connects
again with a new client. Before that it must have stopped writing to pages it had reserved through the
old one: the new messenger has freed them.

Owns: what a worker can ask for, the mapped segment. Does not know: what the worker computes.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence

import msgspec
import numpy as np

from kvstore.client.worker_calls import ADVICE, WorkerCalls
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import (
    Answer,
    Attached,
    CallFailed,
    Count,
    Fetched,
    FromPool,
    Granted,
    Reservation,
    Stats,
    Verified,
)
from kvstore.protocol.calls import (
    Attach,
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Commit,
    DescribeTokens,
    DropIdle,
    FetchBlocks,
    GetStats,
    Lookup,
    OpenGrant,
    PinBlocks,
    Prefetch,
    Release,
    ReservePages,
    StartSend,
    StopFetch,
    UnpinBlocks,
    VerifyBlocks,
)
from kvstore.protocol.channel import Channel
from kvstore.protocol.failures import error_of
from messenger.sender.requests import Urgency
from messenger.wire.checksums import CHECKSUM_BYTES
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, PoolShard, PoolStats

_DECODER = msgspec.msgpack.Decoder(FromPool)
_SERIAL = 0
"""A process has at most one worker; its clients are numbered from 1."""
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
        self._calls = WorkerCalls(channel, instance)
        self.closed = self._calls.closed
        """set when the messenger is gone or has ended the session"""
        self._background: set[asyncio.Task[Answer]] = set()

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
                        raise error_of(answer, ADVICE)
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
        reserving = self._spawn(self._calls.ask(ReservePages(self._calls.new_id(), list(keys), num_private)))
        try:
            answer = await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(self._give_back)
            raise
        assert isinstance(answer, Reservation)
        return answer

    async def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks will be reserved soon: what SSD has of them begins to come to DRAM."""
        await self._calls.send(Prefetch(list(keys)))

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Keeps those of `keys` that are here for `ttl_s`, as long as others can be evicted. How many."""
        answer = await self._calls.ask(PinBlocks(self._calls.new_id(), list(keys), ttl_s, hard=False))
        assert isinstance(answer, Count)
        return answer.num_blocks

    async def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Those of `keys` that `pin` keeps may be evicted like others again; hard pins are of others."""
        await self._calls.ask(UnpinBlocks(self._calls.new_id(), list(keys), hard=False))

    async def drop_idle(self, keys: Sequence[BlockKey]) -> None:
        """Forgets those of `keys` that nobody uses and no pin keeps, in every tier."""
        await self._calls.send(DropIdle(list(keys)))

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
            await self._calls.send(DescribeTokens(reservation_id, first, packed))

    async def wait_for_space(self) -> None:
        """Returns when pages have become free or evictable since the last PoolFullError."""
        await self._calls.ask(AwaitSpace(self._calls.new_id(), self._calls.space_epoch))

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
            await self._calls.send(
                Commit(reservation_id, layers.start, layers.stop, list(pages[part]), packed)
            )

    async def settled(self) -> None:
        """Returns when all commits before it have been taken note of: checksums are in the segment."""
        await self._calls.ask(Lookup(self._calls.new_id(), []))

    async def release(self, reservation_id: int) -> None:
        """Gives everything of a reservation back: cancels its send, revokes its grant. Idempotent.

        A messenger that is gone has released everything.
        """
        try:
            await self._calls.ask(Release(self._calls.new_id(), reservation_id))
        except PoolError:
            if not self.closed.is_set():
                raise

    # -- transfers --------------------------------------------------------------------------------

    async def grant(self, reservation_id: int) -> Grant:
        """Decode: opens the unsealed pages of this reservation to remote writes."""
        answer = await self._calls.ask(OpenGrant(self._calls.new_id(), reservation_id))
        assert isinstance(answer, Granted)
        return answer.grant

    async def send(self, reservation_id: int, grant: Grant, ref_text: str) -> None:
        """Prefill: starts to stream the granted blocks of this reservation to `grant.messenger`, and those of
        `grant.others` to theirs.

        Blocks that are sealed go at once, other layers as they are committed. `ref_text` names the
        request in logs.
        """
        await self._calls.ask(StartSend(self._calls.new_id(), reservation_id, grant, ref_text))

    async def wait_sent(self, reservation_id: int) -> None:
        """Returns when the receiver has verified and acknowledged everything; TransferError otherwise."""
        await self._calls.ask(AwaitSent(self._calls.new_id(), reservation_id))

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
        call = FetchBlocks(self._calls.new_id(), reservation_id, list(sources), list(blocks))
        answer = await self._calls.ask(call, on_layers)
        assert isinstance(answer, Fetched)
        return answer.num_layers, answer.pages

    async def fetch_ahead(
        self, reservation_id: int, sources: Sequence[PoolShard], blocks: Sequence[int]
    ) -> None:
        """As `fetch`, for nobody who waits: behind the transfers that somebody waits for."""
        call_id = self._calls.new_id()
        await self._calls.ask(FetchBlocks(call_id, reservation_id, list(sources), list(blocks), Urgency.BULK))

    async def stop_fetch(self, reservation_id: int) -> None:
        """Ends the fetch of this reservation early, if there is one."""
        await self._calls.send(StopFetch(reservation_id))

    async def verify(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Compares these blocks with their checksums, in every tier. Returns those that had to be dropped."""
        answer = await self._calls.ask(VerifyBlocks(self._calls.new_id(), list(keys)))
        assert isinstance(answer, Verified)
        return answer.damaged

    async def wait_arrived(self, reservation_id: int) -> None:
        """Decode: returns when all granted pages are complete and verified.

        Raises TransferError if a sender's connection was lost, sent damaged bytes or gave up before.
        A sender that never connects is not noticed here: the caller has a deadline.
        """
        await self._calls.ask(AwaitArrived(self._calls.new_id(), reservation_id))

    # -- the rest ---------------------------------------------------------------------------------

    async def stats(self, check_integrity: bool = False) -> PoolStats:
        """Counters; `check_integrity` also looks at every page, which takes time in a large pool."""
        answer = await self._calls.ask(GetStats(self._calls.new_id(), check_integrity))
        assert isinstance(answer, Stats)
        return answer.stats

    async def close(self) -> None:
        """Detaches: the messenger releases all that this worker had reserved."""
        await self._calls.close()
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
        releasing = self._spawn(self._calls.ask(Release(self._calls.new_id(), answer.reservation_id)))
        releasing.add_done_callback(lambda task: task.cancelled() or task.exception())  # gone: released too


def _open_segment(fd: int) -> Segment:
    try:
        segment = Segment.open(fd)
    finally:
        os.close(fd)  # the mapping stays
    assert segment is not None, "a messenger formats before it answers"
    return segment
