"""The worker's end of the connection to its messenger: an asyncio client of the pool, and the mapped segment.

When the messenger is lost, pending calls raise PoolError, `closed` is set, and the worker connects again with
a new client. Before that the worker must have stopped writing to pages that it had reserved through the old
client: the new messenger keeps these pages quarantined until the worker has attached again, and then frees
them.

Owns: a worker's calls, the mapped segment. Does not know: what the worker computes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import numpy as np

from kvstore.client.worker_calls import WorkerCalls
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import (
    Attached,
    Count,
    Done,
    Fetched,
    Granted,
    Located,
    Reservation,
    Stats,
    Verified,
)
from kvstore.protocol.calls import (
    COMMIT_BYTES,
    Attach,
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Commit,
    DescribeTokens,
    DeviceBlocks,
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
from messenger.sender.requests import Urgency
from messenger.wire.checksums import CHECKSUM_BYTES
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, PoolShard, PoolStats

Result = TypeVar("Result")

_SERIAL = 0
"""The serial of the worker's session. Other clients in a process have serials from 1 on."""
_KEYS_PER_MESSAGE = 1 << 12
"""The most keys in one report of the engine's blocks; longer reports are split."""
_TOKEN_BYTES = 1 << 17
"""The most bytes of token ids in one message; longer lists are split."""


class WorkerClient:
    """A worker's attachment to its messenger, made by `connect`.

    The attachment ends with `close`, or when the messenger ends.
    """

    def __init__(self, calls: WorkerCalls, attached: Attached, segment: Segment) -> None:
        self.address = attached.address
        self.wants_token_ids = attached.wants_token_ids
        """Whether a follower of KV events wants the tokens of `describe_tokens`."""
        self.segment = segment
        self._calls = calls
        self.closed = calls.closed
        """Event that is set when the messenger is gone or has ended the session."""
        self._background: set[asyncio.Task[object]] = set()
        """Reservations in flight, and releases of reservations whose caller was cancelled."""

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
        """Wait until the messenger at `socket_path` listens, and return a client that is attached to it.

        Raises MismatchError if the messenger's pool belongs to another model or layout. Raises PoolError if
        the messenger does not answer within `timeout_s`, or already serves a live worker.
        """
        try:
            async with asyncio.timeout(timeout_s):
                attach = Attach(0, instance, incarnation, fingerprint, layout, _SERIAL)
                return cls(*await WorkerCalls.attach(socket_path, attach))
        except TimeoutError:
            raise PoolError(f"no messenger of {instance} at {socket_path} within {timeout_s} s") from None
        except ConnectionError as error:
            raise PoolError(f"messenger of {instance} gone before it answered: {error}") from error

    @property
    def num_pages(self) -> int:
        return self.segment.num_pages

    # -- pages ------------------------------------------------------------------------------------

    async def reserve(self, keys: Sequence[BlockKey], num_private: int, tenant: str = "") -> Reservation:
        """Reserve pages for `keys`, and `num_private` pages without a key. Sealed blocks keep their pages.

        The pages count towards the `tenant`'s share of the pool; an empty name stands for no tenant. If there
        is no room for all pages, no page is reserved: the call raises PoolFullError if there is no room now
        (see `wait_for_space`), PoolError if there never will be. A cancelled call leaves nothing reserved.
        """
        call = ReservePages(self._calls.new_id(), list(keys), num_private, tenant)
        reserving = self._spawn(self._calls.ask(call, Reservation))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(self._release_unwanted)
            raise

    async def has_all(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether DRAM or SSD has each of these blocks. The call does not count as a use."""
        return all((await self._calls.ask(Lookup(self._calls.new_id(), list(keys)), Located)).locations)

    async def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Begin to promote blocks from SSD to DRAM, for a later reservation."""
        await self._calls.send(Prefetch(list(keys)))

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Set soft pins for `ttl_s` seconds on the blocks of `keys` that the pool has.

        Returns the number of these blocks.
        """
        call = PinBlocks(self._calls.new_id(), list(keys), ttl_s, hard=False)
        return (await self._calls.ask(call, Count)).num_blocks

    async def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Remove the soft pins of `keys`."""
        await self._calls.ask(UnpinBlocks(self._calls.new_id(), list(keys), hard=False), Count)

    async def drop_idle(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks from DRAM and SSD, except blocks that are in use in DRAM or pinned."""
        await self._calls.send(DropIdle(list(keys)))

    async def report_device(self, keys: Sequence[BlockKey], *, is_stored: bool) -> None:
        """Report blocks that the engine's own prefix cache has from now on (`is_stored`), or has no longer.

        The messenger assumes an empty cache until the first report, and again when this worker is gone.
        """
        for first in range(0, len(keys), _KEYS_PER_MESSAGE):
            await self._calls.send(DeviceBlocks(list(keys[first : first + _KEYS_PER_MESSAGE]), is_stored))

    async def describe_tokens(self, reservation_id: int, token_ids: Sequence[int]) -> None:
        """Describe the tokens of a reservation's keys, for the KV events of their blocks.

        Prompts with a `cache_salt` must not be described: followers of the events could not distinguish their
        blocks from blocks of prompts without a salt.
        """
        block_size = self.segment.layout.block_size
        num_blocks = len(token_ids) // block_size
        blocks_per_message = max(1, _TOKEN_BYTES // (4 * block_size))
        for first in range(0, num_blocks, blocks_per_message):
            end = min(first + blocks_per_message, num_blocks)
            packed = np.asarray(token_ids[first * block_size : end * block_size], "<u4").tobytes()
            await self._calls.send(DescribeTokens(reservation_id, first, packed))

    async def wait_for_space(self, since: PoolFullError) -> None:
        """Wait until pages have become free or evictable after the refusal `since`."""
        await self._calls.ask(AwaitSpace(self._calls.new_id(), since.space_epoch), Done)

    async def commit(
        self, reservation_id: int, layers: range, pages: Sequence[int], checksums: Sequence[Sequence[int]]
    ) -> None:
        """Declare that the worker has written `layers` of `pages`. Each layer of a page is committed once.

        `checksums[i][j]` is the xxh3-64 of layer `layers[j]` of `pages[i]` (`xxhash.xxh3_64_intdigest`).
        Returns when the message has left. A wrong commit ends the session (`closed`); a commit for a released
        reservation is ignored.
        """
        pages_per_message = max(1, COMMIT_BYTES // (CHECKSUM_BYTES * max(1, len(layers))))
        for start in range(0, len(pages), pages_per_message):
            part = slice(start, start + pages_per_message)
            packed = np.asarray(checksums[part], dtype="<u8").tobytes()
            await self._calls.send(
                Commit(reservation_id, layers.start, layers.stop, list(pages[part]), packed)
            )

    async def settled(self) -> None:
        """Wait until the messenger has handled all earlier commits.

        Their checksums are in the segment then.
        """
        await self._calls.ask(Lookup(self._calls.new_id(), []), Located)

    async def release(self, reservation_id: int) -> None:
        """Release a reservation, cancel its send and revoke its grant. Idempotent.

        Returns also if the messenger is lost, as a lost messenger has released everything.
        """
        try:
            await self._calls.ask(Release(self._calls.new_id(), reservation_id), Done)
        except PoolError:
            if not self.closed.is_set():
                raise

    # -- transfers --------------------------------------------------------------------------------

    async def grant(self, reservation_id: int) -> Grant:
        """Open the unsealed pages of this reservation to remote writes, as a decode instance does."""
        return (await self._calls.ask(OpenGrant(self._calls.new_id(), reservation_id), Granted)).grant

    async def send(self, reservation_id: int, grant: Grant, ref_text: str) -> None:
        """Start to send the granted blocks of this reservation, as a prefill instance does.

        The blocks go to `grant.messenger`, and to the messenger of each grant in `grant.others`. Sealed
        blocks are sent at once. Other blocks are sent layer by layer, as layers are committed. `ref_text`
        names the request in logs.
        """
        await self._calls.ask(StartSend(self._calls.new_id(), reservation_id, grant, ref_text), Done)

    async def wait_sent(self, reservation_id: int) -> None:
        """Wait until the receiver has acknowledged everything. Raises TransferError if that is impossible."""
        await self._calls.ask(AwaitSent(self._calls.new_id(), reservation_id), Done)

    async def fetch(
        self,
        reservation_id: int,
        sources: Sequence[PoolShard],
        blocks: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> tuple[list[int], list[int]]:
        """Fetch `blocks` (indices) of this reservation from the pools of `sources`, layer by layer.

        `on_layers(num_blocks, num_layers)` is called when the first `num_layers` layers of the first
        `num_blocks` blocks have arrived. It is also called several times a second while a part of the next
        layers arrives. The fetch has given up the blocks from `num_blocks` on: until the call returns, the
        caller may write these blocks, and no others.

        Returns for each block the number of layers that have arrived, and its page, which may be a new page.
        If a source fails, no error is raised.
        """
        call = FetchBlocks(self._calls.new_id(), reservation_id, list(sources), list(blocks))
        answer = await self._calls.ask(call, Fetched, on_layers)
        return answer.num_layers, answer.pages

    async def fetch_ahead(
        self, reservation_id: int, sources: Sequence[PoolShard], blocks: Sequence[int]
    ) -> list[int]:
        """Fetch blocks as bulk, after the transfers that requests wait for.

        Returns for each block the number of layers that have arrived.
        """
        call_id = self._calls.new_id()
        call = FetchBlocks(call_id, reservation_id, list(sources), list(blocks), Urgency.BULK)
        return (await self._calls.ask(call, Fetched)).num_layers

    async def stop_fetch(self, reservation_id: int) -> None:
        """End the fetch of this reservation early, if there is one."""
        await self._calls.send(StopFetch(reservation_id))

    async def verify(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Have the copies of these blocks in DRAM and on SSD compared with their checksums.

        Returns the keys of blocks with a damaged copy, which was dropped.
        """
        return (await self._calls.ask(VerifyBlocks(self._calls.new_id(), list(keys)), Verified)).damaged

    async def wait_arrived(self, reservation_id: int) -> None:
        """Wait until all granted pages are complete and verified, as a decode instance does.

        Raises TransferError if a sender's connection was lost before that, or if a sender sent damaged bytes
        or gave up. A sender that never connects is not noticed here: the caller has a deadline.
        """
        await self._calls.ask(AwaitArrived(self._calls.new_id(), reservation_id), Done)

    # -- the rest ---------------------------------------------------------------------------------

    async def stats(self, check_integrity: bool = False) -> PoolStats:
        """Return the pool's counters.

        `check_integrity`: first check every page, which takes time in a large pool.
        """
        return (await self._calls.ask(GetStats(self._calls.new_id(), check_integrity), Stats)).stats

    async def close(self) -> None:
        """Close the connection. The messenger releases all reservations of this worker."""
        self._calls.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.segment.close()

    def _spawn(self, work: Coroutine[None, None, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _release_unwanted(self, reserving: "asyncio.Task[Reservation]") -> None:
        """Release a reservation whose caller was cancelled."""
        if reserving.cancelled() or reserving.exception() is not None:
            return
        call = Release(self._calls.new_id(), reserving.result().reservation_id)
        releasing = self._spawn(self._calls.ask(call, Done))
        releasing.add_done_callback(lambda task: task.cancelled() or task.exception())  # gone: released too
