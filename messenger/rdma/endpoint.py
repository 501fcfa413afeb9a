"""A queue pair to one peer: writes into its memory and reads from it, driven by the event loop.

Calls share the send queue: each posts a chain of requests in turn. The device gets no further chain while
MAX_BYTES_IN_FLIGHT are in flight, so that a small transfer does not wait behind a large one. The device
reports completed chains through a completion channel, whose descriptor the event loop watches.

When a call returns or raises, the device does not touch its memory any more: a cancelled call waits for the
requests that it has posted, and a failed queue pair is destroyed before callers get the error.

Owns: one queue pair with its completion queue and channel, the calls on it. Does not know: how the two sides
exchange their `EndpointInfo`, the meaning of bytes.
"""

import asyncio
import logging
import math
import os
import secrets
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from messenger.rdma.adapter import Adapter
from messenger.rdma.errors import SUCCESS, RdmaError, RdmaUnavailableError, completion_error
from messenger.rdma.memory import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, RdmaMemory
from messenger.rdma.verbs import load_verbs
from messenger.rdma.work import MAX_PIECE_BYTES, RDMA_READ, RDMA_WRITE, Keys, Pieces, Slices, cut
from messenger.transport.transports import Remedy
from messenger.wire.rdma_info import EndpointInfo, LinkLayer

log = logging.getLogger(__name__)

MAX_BYTES_IN_FLIGHT: Final = 8 << 20
"""No further chain is posted while this many bytes are in flight on the device.

A small transfer waits until bytes that were posted before it have moved.
"""
_QUEUE_DEPTH: Final = 128
"""The most work requests that the device holds."""
_MAX_READS: Final = 16
"""The most reads that the card serves at once in one direction of a queue pair."""
_NUM_RETRIES: Final = 6
"""The number of retries of a request without an answer. Soft-RoCE takes 7 for infinity."""
_DEAD_PEER_S: Final = 1.0
"""Seconds without an answer after which a peer counts as dead. The device times this roughly."""
_RNR_DELAY_CODE: Final = 12
"""The verbs' code for 0.64 ms: the delay before a retry if the peer was not ready to receive."""
_HOP_LIMIT: Final = 64
"""The most routers that a packet may pass: the kernel's default for IP."""
_MTU_CODES: Final = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}  # enum ibv_mtu
_RELIABLE_CONNECTION: Final = 2  # enum ibv_qp_type


class Operation(Protocol):
    """The interface of an operation (a read, a write, the binding of windows), posted one chain at a time."""

    def post(self, qp: Any, max_requests: int) -> tuple[int, int]:
        """Post a chain, whose last request is signalled. Returns the numbers of posted requests and bytes."""

    @property
    def is_posted(self) -> bool:
        """Whether no request is left to post."""


@dataclass(slots=True)
class _Call:
    operation: Operation
    done: "asyncio.Future[RdmaError | None]"
    num_chains: int = 0
    """Posted chains that are not completed."""
    is_cancelled: bool = False

    @property
    def is_posted(self) -> bool:
        return self.is_cancelled or self.operation.is_posted


@dataclass(slots=True)
class _Transfer:
    """One write or read in progress."""

    adapter: Adapter
    opcode: int
    pieces: Pieces
    local_key: int
    num_posted: int = field(default=0)

    @property
    def is_posted(self) -> bool:
        return self.num_posted == len(self.pieces.num_bytes)

    def post(self, qp: Any, max_requests: int) -> tuple[int, int]:
        begin, end = self.num_posted, self.pieces.chain_end(self.num_posted, max_requests)
        chain = self.adapter.chain(self.opcode)
        qp.post_send(chain.fill(self.pieces, begin, end, self.local_key))
        self.num_posted = end
        return end - begin, sum(self.pieces.num_bytes[begin:end])


class Endpoint:
    """A queue pair, which must be connected before use.

    After a `failure` the queue pair stays broken; both sides must make a new one.
    """

    def __init__(
        self, adapter: Adapter, memory: RdmaMemory, peer: str, *, dead_peer_s: float = _DEAD_PEER_S
    ) -> None:
        """Make a queue pair. Slices refer to `memory` unless a call names another.

        `peer` is the peer's name for messages.

        All calls fail when the peer has not answered for `dead_peer_s` seconds. A device may take longer to
        notice: the standard allows four times `dead_peer_s`.
        """
        self.peer = peer
        self.failure: RdmaError | None = None
        self.openings: set[Any] = set()
        """The pyverbs objects of windows and regions that are open to the peer.

        They must close before the queue pair.
        """
        self.adapter = adapter
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._timeout_code = _timeout_code(dead_peer_s)
        self._psn = secrets.randbits(24)
        self._is_connected = False
        self._max_piece_bytes = min(MAX_PIECE_BYTES, adapter.device.max_message_bytes)
        self._num_free = min(_QUEUE_DEPTH, adapter.max_work_requests)
        self._bytes_in_flight = 0
        self._waiting: deque[_Call] = deque()
        """Calls with requests left to post, served in turn."""
        self._chains: deque[tuple[_Call, int, int]] = deque()
        """Posted chains, in order: the call, the number of requests, the number of bytes."""
        self._open()

    def local_info(self) -> EndpointInfo:
        device = self.adapter.device
        return EndpointInfo(
            qp_num=self._qp_num,
            psn=self._psn,
            gid=device.gid,
            lid=device.lid,
            link_layer=device.link_layer,
            mtu_bytes=device.mtu_bytes,
            max_message_bytes=device.max_message_bytes,
            max_reads_in=min(_MAX_READS, self.adapter.max_reads_in),
        )

    def connect(self, remote: EndpointInfo) -> None:
        """Connect this queue pair to the peer's. Raises RdmaError; the endpoint is closed then."""
        if self.failure is not None:
            raise RdmaError(str(self.failure), self.failure.remedy)
        verbs, device = load_verbs(), self.adapter.device
        try:
            if remote.link_layer is not device.link_layer:
                raise ValueError(f"{device} is on {device.link_layer}, the peer on {remote.link_layer}")
            if remote.max_message_bytes < remote.mtu_bytes or remote.max_reads_in < 1:
                raise ValueError(
                    f"expected messages of a packet or more and one read at least, got"
                    f" {remote.max_message_bytes} bytes and {remote.max_reads_in} reads"
                )
            route = verbs.addr.GlobalRoute(
                dgid=verbs.addr.GID(remote.gid), sgid_index=device.gid_index, hop_limit=_HOP_LIMIT
            )
            attributes = verbs.qp.QPAttr()
            attributes.ah_attr = verbs.addr.AHAttr(
                gr=route,
                is_global=int(device.link_layer is LinkLayer.ETHERNET),
                port_num=device.port,
                dlid=remote.lid,
            )
            attributes.path_mtu = _MTU_CODES[min(device.mtu_bytes, remote.mtu_bytes)]
            attributes.dest_qp_num = remote.qp_num
            attributes.rq_psn = remote.psn
            attributes.sq_psn = self._psn
            attributes.max_dest_rd_atomic = min(_MAX_READS, self.adapter.max_reads_in)
            attributes.max_rd_atomic = min(_MAX_READS, self.adapter.max_reads_out, remote.max_reads_in)
            attributes.min_rnr_timer = _RNR_DELAY_CODE
            attributes.rnr_retry = _NUM_RETRIES
            attributes.retry_cnt = _NUM_RETRIES
            attributes.timeout = self._timeout_code
            self._qp.to_rts(attributes)
        except (verbs.Error, KeyError, ValueError, OverflowError, TypeError) as error:
            # What the peer sent may be no address at all.
            failure = RdmaError(f"RDMA with {self.peer}: cannot connect: {error}", Remedy.OTHER_PATH)
            self._fail(failure)
            raise failure from error
        self._max_piece_bytes = min(self._max_piece_bytes, remote.max_message_bytes)
        self._is_connected = True

    async def write(self, slices: Slices, remote_key: Keys, *, memory: RdmaMemory | None = None) -> None:
        """Write local slices to their remote addresses; return when all of them are in the peer's memory.

        `remote_key` is one key for all slices, or a sequence with a key for each. Raises RdmaError; it is
        then unknown how many bytes have arrived.
        """
        await self._transfer(RDMA_WRITE, slices, remote_key, memory or self._memory)

    async def read(self, slices: Slices, remote_key: Keys, *, memory: RdmaMemory | None = None) -> None:
        """Fill local slices from their remote addresses. Raises RdmaError."""
        await self._transfer(RDMA_READ, slices, remote_key, memory or self._memory)

    def check_usable(self) -> None:
        """Check that the endpoint has not failed. Raises RdmaError if it has."""
        if self.failure is not None:
            raise _of_others(self.failure)
        assert self._is_connected, "connect first"

    def revoke(self, reason: str = "revoked") -> None:
        """Close the endpoint to the peer at once.

        Afterwards no write of the peer arrives through this queue pair, and all calls on it have failed. The
        peer gets no answer any more.
        """
        self._fail(RdmaError(f"RDMA with {self.peer}: the queue pair was {reason}", Remedy.RETRY))

    def close(self) -> None:
        """Free the queue pair. Calls in progress end with an error."""
        self.revoke("closed")

    async def perform(self, operation: Operation) -> None:
        """Post an operation, in turn with other operations, and wait until it is complete.

        Raises RdmaError.
        """
        self.check_usable()
        call = _Call(operation, self._loop.create_future())
        self._waiting.append(call)
        self._post()
        try:
            error = await asyncio.shield(call.done)
        except asyncio.CancelledError:
            self._cancel(call)
            try:
                await asyncio.shield(call.done)
            except asyncio.CancelledError:
                self.revoke()
            raise
        if error is not None:
            raise RdmaError(str(error), error.remedy)

    async def _transfer(self, opcode: int, slices: Slices, keys: Keys, memory: RdmaMemory) -> None:
        self.check_usable()
        pieces = cut(slices, keys, memory, self._max_piece_bytes)
        if pieces.num_bytes:
            await self.perform(_Transfer(self.adapter, opcode, pieces, memory.local_key))

    def _open(self) -> None:
        verbs, device = load_verbs(), self.adapter.device
        try:
            before = _event_fds()
            self._channel = verbs.cq.CompChannel(self.adapter.context)
            added = _event_fds() - before  # pyverbs does not tell which it is
            if len(added) != 1:
                raise RdmaUnavailableError(f"{device}: expected one new event descriptor, found {len(added)}")
            self._event_fd = added.pop()
            self._cq = verbs.cq.CQ(self.adapter.context, self._num_free + 1, None, self._channel, 0)
            capacity = verbs.qp.QPCap(max_send_wr=self._num_free, max_recv_wr=1)
            kind = verbs.qp.QPInitAttr(
                qp_type=_RELIABLE_CONNECTION, scq=self._cq, rcq=self._cq, cap=capacity, sq_sig_all=0
            )
            attributes = verbs.qp.QPAttr(port_num=device.port)
            attributes.qp_access_flags = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
            self._qp = verbs.qp.QP(self.adapter.domain, kind, attributes)
            self._qp_num: int = self._qp.qp_num
            self._cq.req_notify()
        except verbs.Error as error:
            raise RdmaUnavailableError(f"{device} cannot make a queue pair: {error}") from error
        os.set_blocking(self._event_fd, False)
        self._loop.add_reader(self._event_fd, self._on_event)

    def _post(self) -> None:
        while self._waiting and self._num_free and self._bytes_in_flight < MAX_BYTES_IN_FLIGHT:
            call = self._waiting.popleft()
            try:
                num_requests, num_bytes = call.operation.post(self._qp, self._num_free)
            except load_verbs().Error as error:
                self._waiting.appendleft(call)
                self._fail(RdmaError(f"RDMA with {self.peer}: cannot post: {error}", Remedy.OTHER_PATH))
                return
            self._num_free -= num_requests
            self._bytes_in_flight += num_bytes
            self._chains.append((call, num_requests, num_bytes))
            call.num_chains += 1
            if not call.is_posted:
                self._waiting.append(call)

    def _on_event(self) -> None:
        verbs = load_verbs()
        try:
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
            self._cq.req_notify()  # before polling: what completes from here on is another event
            while self.failure is None:
                num_completions, completions = self._cq.poll(_QUEUE_DEPTH)
                for completion in completions:
                    self._complete(completion.status)
                if num_completions < _QUEUE_DEPTH:
                    break
        except verbs.Error as error:
            self._fail(RdmaError(f"RDMA with {self.peer}: no completions: {error}", Remedy.OTHER_PATH))
        if self.failure is None:
            self._post()

    def _complete(self, status: int) -> None:
        if self.failure is not None:
            return
        if status != SUCCESS:
            self._fail(completion_error(status, self.peer), self._chains[0][0] if self._chains else None)
            return
        call, num_requests, num_bytes = self._chains.popleft()
        self._num_free += num_requests
        self._bytes_in_flight -= num_bytes
        call.num_chains -= 1
        if call.is_posted and not call.num_chains:
            call.done.set_result(None)

    def _cancel(self, call: _Call) -> None:
        """Post no more chains of a call. The call is done when its posted chains have completed."""
        if call.done.done():
            return
        call.is_cancelled = True
        if call in self._waiting:
            self._waiting.remove(call)
        if not call.num_chains:
            call.done.set_result(None)

    def _fail(self, error: RdmaError, cause: _Call | None = None) -> None:
        """Destroy the queue pair, and end all calls with errors.

        If the peer has refused the call `cause`, the other calls get errors whose remedy is a retry.
        """
        if self.failure is not None:
            return
        self.failure = error
        self._loop.remove_reader(self._event_fd)
        # In this order: each object can be closed only after the objects before it.
        for verbs_object in (*self.openings, self._qp, self._cq, self._channel):
            try:
                verbs_object.close()
            except load_verbs().Error as problem:  # the device itself is going away
                log.warning("RDMA with %s: %s", self.peer, problem)
        self.openings.clear()
        calls = (*self._waiting, *(call for call, _num_requests, _num_bytes in self._chains))
        for call in calls:
            if not call.done.done():
                call.done.set_result(error if call is cause else _of_others(error))
        self._waiting.clear()
        self._chains.clear()


def _of_others(failure: RdmaError) -> RdmaError:
    """Return the error for calls that have not caused the failure."""
    is_refusal = failure.remedy is Remedy.GIVE_UP
    return RdmaError(str(failure), Remedy.RETRY if is_refusal else failure.remedy)


def _timeout_code(dead_peer_s: float) -> int:
    """Return the verbs' timeout code n, which stands for 4.096 us * 2^n.

    With this code all retries together take at most `dead_peer_s` seconds.
    """
    each_s = dead_peer_s / (_NUM_RETRIES + 1)
    return max(1, min(31, math.floor(math.log2(each_s / 4.096e-6))))


def _event_fds() -> set[int]:
    """Return the descriptors of this process through which verbs report events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in os.readlink(entry):
                found.add(int(entry.name))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
