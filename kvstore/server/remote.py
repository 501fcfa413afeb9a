"""Service for clients on other hosts: messages and blocks over TCP.

A block is received straight into its page and sealed when it has been verified. A block is sent straight from
its page, under a lease. Lengths are checked before anything is done. A client that stalls in the middle of a
transfer, or is silent while pages are reserved for it, loses its connection.

A connection whose peer does not authenticate is closed and counted (`mooncake.security.greeting`).

Owns: the connections of remote clients. Does not know: how pages are found.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvstore.pool.claims import Block, PageReservation
from kvstore.protocol.answers import CallFailed, Connected, Detached, Done, FromRemotePool, GotBlocks
from kvstore.protocol.calls import (
    Commit,
    Connect,
    DescribeTokens,
    EndLease,
    GetBlocks,
    Prefetch,
    PutBlocks,
    SealBlocks,
    ToPool,
    ToRemotePool,
)
from kvstore.protocol.frames import LONGEST_WAIT_S, SMALL_BYTES, FrameBuffer, encode_frame, max_keys
from kvstore.server.client_session import ClientSession
from kvstore.server.stalls import StallWatch, longest_s
from kvstore.server.store import Store
from messenger.receiver.receiver import UnauthenticatedPeers
from messenger.transport.handshake import AuthenticationError
from messenger.transport.stream import Stream
from messenger.transport.transports import Traffic
from messenger.wire.checksums import CHECKSUM_BYTES, PIECE_BYTES, LayerChecksums
from mooncake.errors import MooncakeError, PoolError, PoolFullError, TransferError
from mooncake.messages.blocks import BlockKey
from mooncake.security.greeting import POOL, Greeting, GreetingServer, Proof
from mooncake.security.keys import ClusterKey

log = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(ToRemotePool)
_GREETING_DECODER = msgspec.msgpack.Decoder(Greeting)
_PROOF_DECODER = msgspec.msgpack.Decoder(Proof)
_TURN_BYTES = 4 << 20
"""The bytes that one client moves before other tasks run."""
_GROUP_BYTES = 16 << 20
"""The most bytes of blocks for which pages are reserved in one step."""
_MOST_UNANSWERED = 256
"""The most calls of one client that may wait for their answers."""
_MOST_CALLS_AT_ONCE = 16
"""The most calls of one client that are handled before other clients' calls."""
Incoming = TypeVar("Incoming")
Admit = Callable[[Connect, None, Callable[[FromRemotePool], None]], tuple[Connected, ClientSession]]
"""A function that opens a client's session, as `Service.admit` does."""


async def serve_client(
    stream: Stream,
    admit: Admit,
    tasks: asyncio.TaskGroup,
    key: ClusterKey,
    traffic: Traffic,
    unauthenticated: UnauthenticatedPeers,
    *,
    timeout_s: float,
) -> None:
    """Serve a client from its greeting until it leaves.

    The client's proof, and then its first message, must arrive within `timeout_s` seconds each.
    """
    client = _Client(stream)
    try:
        with unauthenticated.entered(stream):
            await client.authenticate(key, timeout_s)
        async with asyncio.timeout(timeout_s):
            await client.open(admit, tasks)
        await client.serve()
    except AuthenticationError as error:
        traffic.count_unauthenticated(str(error))
    except MooncakeError as error:
        log.warning("a client on another host is sent away: %s", error)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(timeout_s):
                await client.send([encode_frame(Detached(str(error)))])
    except OSError as error:
        log.info("the connection to a client on another host ended: %s", error or "no message in time")
    finally:
        client.close()


class _Client:
    """One client's connection.

    Messages are handled one after another. Calls that must wait are answered later.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._frames = FrameBuffer()
        self._loop = asyncio.get_running_loop()
        self._store: Store
        self._session: ClientSession
        self._outbox: list[bytes | memoryview] = []
        self._sending = asyncio.Lock()
        self._is_handling = False
        self._has_late_answer = asyncio.Event()
        """Event that is set when an answer is posted while no message is being handled."""
        self._num_unanswered = 0
        self._payload_left = 0
        """Bytes of the message's payload that have not been taken off the stream."""
        self._num_moved = 0
        """Bytes that were moved since other tasks had their turn."""
        self._stalls = StallWatch(stream.shut_down, self._holds_pages)
        self._late_answers: asyncio.Task[None]

    async def authenticate(self, key: ClusterKey, timeout_s: float) -> None:
        """Authenticate the client. Raises AuthenticationError.

        The client must prove within `timeout_s` seconds that it knows `key`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                greeting, _ = await self._next(_GREETING_DECODER)
                pool = GreetingServer(key, POOL, greeting)
                await self._stream.send([encode_frame(pool.challenge)])
                proof, _ = await self._next(_PROOF_DECODER)
        except (OSError, PoolError) as error:
            raise AuthenticationError(str(error) or f"it proves nothing within {timeout_s:g} s") from error
        if not pool.admits(proof):
            raise AuthenticationError("it has another cluster key")
        self._frames.trust()

    async def open(self, admit: Admit, tasks: asyncio.TaskGroup) -> None:
        """Receive the first message and answer it. Raises the error with which the client is refused."""
        connect, payload_bytes = await self._next(_DECODER)
        if not isinstance(connect, Connect) or payload_bytes:
            raise PoolError(f"the first message is {type(connect).__name__}; it must be Connect")
        try:
            answer, self._session = admit(connect, None, self._post)
        except MooncakeError as error:
            await self.send([encode_frame(CallFailed.of(connect.call_id, error))])
            raise
        self._store = self._session.store
        self._late_answers = tasks.create_task(self._send_late_answers())
        self._stalls.start()
        await self.send([encode_frame(answer)])

    async def serve(self) -> None:
        """Handle messages until the connection ends, and raise OSError then.

        Raises PoolError for a message that no correct client sends.
        """
        while True:
            match await self._stream.receive_with(self._take_calls):
                case PutBlocks() as put:
                    await self._put(put)
                case GetBlocks() as get:
                    await self._get(get)
                case None:
                    await asyncio.sleep(0)  # others have their turn
            if self._outbox:
                await self.send([])

    def close(self) -> None:
        if self._stalls.is_watching:
            self._stalls.stop()
            self._late_answers.cancel()
            self._session.end()
        self._stream.close()

    # -- messages ---------------------------------------------------------------------------------

    def _take_calls(self) -> PutBlocks | GetBlocks | None:
        """Receive calls, and answer those that move no blocks, while the task in `serve` goes on waiting.

        Returns a call that moves blocks; None when other tasks must have their turn, or when answers must
        wait until the client reads. Raises BlockingIOError when no call is there.
        """
        for _ in range(_MOST_CALLS_AT_ONCE):
            while (room := self._frames.room_for_message()) is not None:
                self._frames.received(self._stream.receive_now([room]))
            message, self._payload_left = self._decode(_DECODER)
            self._stalls.heard()
            if isinstance(message, PutBlocks):
                return message
            if self._payload_left:
                raise PoolError(f"{type(message).__name__} came with a payload")
            if isinstance(message, GetBlocks):
                return message
            self._handle(message)
            if self._outbox and not self._send_now():
                return None
        return None

    async def _next(self, decoder: "msgspec.msgpack.Decoder[Incoming]") -> tuple[Incoming, int]:
        """Return the next message and the number of its payload bytes.

        Raises PoolError for an invalid message, OSError if the connection ends.
        """
        while (room := self._frames.room_for_message()) is not None:
            self._frames.received(await self._stream.receive_some([room]))
        return self._decode(decoder)

    def _decode(self, decoder: "msgspec.msgpack.Decoder[Incoming]") -> tuple[Incoming, int]:
        encoded, payload_bytes = self._frames.take_message()
        try:
            return decoder.decode(encoded), payload_bytes
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PoolError(f"a message cannot be read: {str(error)[:200]}") from error

    def _handle(self, message: ToPool) -> None:
        if isinstance(message, Commit | SealBlocks | DescribeTokens):
            raise PoolError(f"{type(message).__name__} is for those who have the pool's memory mapped")
        self._num_unanswered += not isinstance(message, EndLease | Prefetch)
        if self._num_unanswered > _MOST_UNANSWERED:
            raise PoolError(f"more than {_MOST_UNANSWERED} calls wait for their answers")
        self._is_handling = True
        try:
            self._session.handle(message)
        finally:
            self._is_handling = False

    def _post(self, answer: FromRemotePool) -> None:
        """Queue an answer of the session. Raises PoolError if the answer is too large."""
        self._outbox.append(encode_frame(answer))
        self._num_unanswered -= 1
        if not self._is_handling:
            self._has_late_answer.set()

    async def _send_late_answers(self) -> None:
        with contextlib.suppress(OSError):  # `serve` sees it too
            while True:
                await self._has_late_answer.wait()
                self._has_late_answer.clear()
                await self.send([])

    def _send_now(self) -> bool:
        """Send queued answers. Returns False if some must wait."""
        if self._sending.locked():
            return False
        self._outbox = list(self._stream.send_now([memoryview(answer) for answer in self._outbox]))
        return not self._outbox

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send queued answers, and then all of `buffers`."""
        async with self._sending:
            waiting, self._outbox = self._outbox, []
            turn: list[bytes | memoryview] = [*waiting]
            total_bytes = sum(map(len, waiting)) + sum(map(len, buffers))
            self._stalls.send_due_s = self._stalls.due_s(total_bytes)
            for buffer in buffers:
                turn.append(buffer)
                if self._is_others_turn(len(buffer)):
                    await self._send_all(turn)
                    turn.clear()
                    await asyncio.sleep(0)
            await self._send_all(turn)
            self._stalls.send_due_s = None

    async def _send_all(self, buffers: Sequence[bytes | memoryview]) -> None:
        if rest := self._stream.send_now([memoryview(buffer) for buffer in buffers]):
            await self._stream.send(rest)

    # -- blocks -----------------------------------------------------------------------------------

    async def _get(self, call: GetBlocks) -> None:
        try:
            await self._send_blocks(call)
        except MooncakeError as error:
            await self.send([encode_frame(CallFailed.of(call.call_id, error))])

    async def _send_blocks(self, call: GetBlocks) -> None:
        """Send the blocks of a call. Raises MooncakeError only before anything is sent."""
        segment, table = self._store.segment, self._store.pool.table
        layers = range(call.layer_begin, call.layer_end)
        if not 0 <= layers.start < layers.stop <= table.num_layers:
            raise PoolError(
                f"layers [{layers.start}, {layers.stop}) are wanted, there are {table.num_layers}"
            )
        _check_number(call.keys, len(layers))
        sent_bytes = len(call.keys) * len(layers) * segment.layout.layer_bytes
        lease = await self._session.lease(call.keys, longest_s(sent_bytes))
        try:
            pages = [page for page in lease.pages if page is not None]
            checksums = b"".join(table.checksums(page, layers) for page in pages)
            found = [page is not None for page in lease.pages]
            payload_bytes = len(pages) * len(layers) * segment.layout.layer_bytes
            frame = encode_frame(GotBlocks(call.call_id, found, checksums), payload_bytes)
            await self.send([frame, *(segment.layers_view(page, layers) for page in pages)])
        finally:
            self._session.end_lease(lease.lease_id)

    async def _put(self, call: PutBlocks) -> None:
        """Store a call's blocks, and answer. Raises PoolError for a call that no correct client sends."""
        table, layout = self._store.pool.table, self._store.segment.layout
        _check_number(call.keys, table.num_layers)
        if self._payload_left != len(call.keys) * layout.block_bytes:
            raise PoolError(
                f"{len(call.keys)} blocks of {layout.block_bytes} bytes came with a payload of"
                f" {self._payload_left} bytes"
            )
        if len(call.checksums) != len(call.keys) * table.num_layers * CHECKSUM_BYTES:
            raise PoolError(f"{len(call.keys)} blocks came with {len(call.checksums)} bytes of checksums")
        if not 0 <= call.timeout_s <= LONGEST_WAIT_S:
            raise PoolError(f"a timeout of {call.timeout_s} s; it must be at most {LONGEST_WAIT_S:g} s")
        try:
            await self._receive_blocks(call)
        except MooncakeError as error:
            self._stalls.receive_due_s = self._stalls.due_s(self._payload_left)
            await self._skip(self._payload_left)
            self._stalls.receive_due_s = None
            await self.send([encode_frame(CallFailed.of(call.call_id, error))])
        else:
            await self.send([encode_frame(Done(call.call_id))])

    async def _receive_blocks(self, call: PutBlocks) -> None:
        pool, layout = self._store.pool, self._store.segment.layout
        stride = CHECKSUM_BYTES * layout.num_layers
        group_len = max(1, min(_GROUP_BYTES // layout.block_bytes, pool.table.num_pages // 4))
        for start in range(0, len(call.keys), group_len):
            keys = call.keys[start : start + group_len]
            checksums = call.checksums[start * stride : (start + group_len) * stride]
            reservation = await self._reserve(keys, call.timeout_s)
            self._stalls.receive_due_s = self._stalls.due_s(len(keys) * layout.block_bytes)
            try:
                for index, block in enumerate(reservation.blocks):
                    expected = checksums[index * stride : (index + 1) * stride]
                    await self._receive_block(block, expected)
            finally:
                self._stalls.receive_due_s = None
                self._session.release(reservation.reservation_id, "the client's blocks have come")

    async def _reserve(self, keys: Sequence[BlockKey], timeout_s: float) -> PageReservation:
        """Reserve pages for `keys`. Raises PoolFullError if there is no room within `timeout_s` seconds."""
        deadline_s = self._loop.time() + timeout_s
        while True:
            try:
                return await self._session.reserve(keys, 0)
            except PoolFullError as error:
                space_epoch = error.space_epoch
                full = PoolFullError(f"no room for {len(keys)} blocks within {timeout_s:g} s: {error}")
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._store.wait_for_space(space_epoch)
            except TimeoutError:
                raise full from None

    async def _receive_block(self, block: Block, expected: bytes) -> None:
        """Receive the next block of the payload into its page, verify and seal it.

        The bytes of a block that was found are skipped. Raises TransferError for a damaged block.
        """
        segment = self._store.segment
        if block.found:
            await self._skip(segment.layout.block_bytes)
            return
        page = segment.page_view(block.page)
        checksums = LayerChecksums(page, segment.layout.layer_bytes)
        if len(page) <= SMALL_BYTES:
            await self._gather(len(page))
        filled = 0
        while filled < len(page):
            filled += await self._receive_into(page[filled : filled + PIECE_BYTES])
            checksums.advance(filled)
        if checksums.packed() != expected:
            raise TransferError(f"block {(block.key or b'').hex()} was damaged on its way; store it again")
        self._store.pool.record_arrival(block, range(segment.layout.num_layers), expected)

    async def _skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
        while num_bytes:
            num_bytes -= await self._receive_into(scratch[:num_bytes])

    async def _gather(self, num_bytes: int) -> None:
        """Receive at least `num_bytes` bytes, the size of a small block.

        If further bytes have arrived already, they are received too.
        """
        while (room := self._frames.room_for(num_bytes, SMALL_BYTES)) is not None:
            self._frames.received(await self._stream.receive_some([room]))

    async def _receive_into(self, target: memoryview) -> int:
        """Receive some bytes of the payload, and return their number."""
        num_bytes = self._frames.take_into(target) or await self._stream.receive_some([target])
        self._payload_left -= num_bytes
        if self._is_others_turn(num_bytes):
            await asyncio.sleep(0)
        return num_bytes

    def _is_others_turn(self, num_bytes: int) -> bool:
        self._num_moved += num_bytes
        if self._num_moved < _TURN_BYTES:
            return False
        self._num_moved = 0
        return True

    def _holds_pages(self) -> bool:
        return bool(self._store.pool.claims_of(self._session.user.owner)[0])


def _check_number(keys: Sequence[BlockKey], num_layers: int) -> None:
    if not 0 < len(keys) <= max_keys(num_layers):
        raise PoolError(f"{len(keys)} blocks in one message; 1 to {max_keys(num_layers)} may be")
