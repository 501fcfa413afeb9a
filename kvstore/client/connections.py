"""A client's connection to a pool: one session, used by one thread at a time.

Here is the common base of both kinds of connection: `mapped` (Unix socket and shared memory) and `streamed`
(TCP).

Owns: calls and their answers. Does not know: threads, other pools.
"""

import itertools
import os
import socket
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kvstore.protocol.answers import (
    Answer,
    CallFailed,
    Detached,
    Done,
    FromRemotePool,
    GotBlocks,
    Reservation,
    Verified,
)
from kvstore.protocol.calls import (
    COMMIT_BYTES,
    AwaitSpace,
    Call,
    GetBlocks,
    Notice,
    PutBlocks,
    Release,
    ReservePages,
    VerifyBlocks,
)
from kvstore.protocol.frames import max_keys
from messenger.wire.checksums import CHECKSUM_BYTES, Addresses, Digests
from mooncake.errors import ConfigError, PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import MessengerAddress
from mooncake.security.keys import ClusterKey

RemoteCall = Call | GetBlocks | PutBlocks
Expected = TypeVar("Expected", bound=Answer | GotBlocks)
CopyLayers = Callable[[range, Sequence[int], Addresses], Digests]
"""A function of the caller that copies consecutive layers of some blocks to memory.

Its arguments are the layers, the positions of the blocks in the call, and an address for each block. The
function returns the xxh3-64 of every layer, `[block][layer]`, and may wait until the layers are there.
"""

_WRITTEN_BYTES = 1 << 20
"""The bytes of layers that `put_layers` copies and commits at a time, or one layer if that is more."""

_TIMEVAL = struct.Struct("@ll")
_LEAST_TIMEOUT_US = 1000  # the kernel takes 0 for "for ever"


class PoolURL(NamedTuple):
    """The address of a pool as text and parsed: a Unix socket, or a host and port."""

    text: str
    unix_path: str | None
    tcp: tuple[str, int] | None

    @classmethod
    def parse(cls, text: str) -> "PoolURL":
        """Return the address that `text` names. Raises ConfigError for an invalid address.

        The forms are `unix:/path`, `tcp://host:port` and `tcp://[IPv6]:port`.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(text, text.removeprefix("unix:"), None)
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if text.startswith("tcp://") and host and is_bracketed == (":" in host) and is_port:
            return cls(text, None, (host.strip("[]"), int(port)))
        raise ConfigError(
            f"a pool's address is unix:/path/of.sock, tcp://host:port or tcp://[IPv6]:port, not {text!r}"
        )


def key_for(urls: Sequence[PoolURL], key_file: Path | str | None) -> ClusterKey | None:
    """Return the cluster key in `key_file`; None if all pools are on this host.

    Raises ConfigError if a key is needed, and `key_file` is missing or has no valid key.
    """
    remote = [url.text for url in urls if url.tcp is not None]
    if not remote:
        return None
    if key_file is None:
        raise ConfigError(
            f"{remote[0]} listens only to those who know its cluster's key: name the file that has it, as"
            " key_file=... or mooncake-kv --key-file"
        )
    return ClusterKey.load(Path(key_file))


class PoolConnection(ABC):
    """A client's session with a pool. `call`, and the methods that use it, are for one thread at a time.

    Methods raise ConnectionError if the pool is gone, and TimeoutError if it is silent for too long. Only
    `close` is allowed after these errors. Errors of `mooncake.errors` are answers of the pool. The connection
    stays usable after them, except if the pool has ended the session: then `is_open` is False.
    """

    address: MessengerAddress
    fingerprint: str
    layout: KVLayout
    num_pages: int
    """The number of pages of the pool's DRAM."""

    def __init__(self, sock: socket.socket, url: PoolURL, serial: int, timeout_s: float) -> None:
        self.url = url
        self.serial = serial
        self.is_open = True
        self._sock = sock
        self._timeout_s = timeout_s
        self._timeouts_s: dict[int, float] = {}
        """Timeouts that are set in the kernel, by socket option."""
        self._call_ids = itertools.count(1)
        self._await_space: AwaitSpace | None = None
        """The `AwaitSpace` call that has no answer yet, or None. Its caller may have stopped waiting."""
        self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
        self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
        _connections.add(self)

    # -- calls ------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._call_ids)

    def call(self, call: RemoteCall, expected: type[Expected], timeout_s: float | None = None) -> Expected:
        """Return the answer to `call`, which must be of type `expected`.

        Raises the error with which the pool answers, or TimeoutError after `timeout_s` seconds without any
        answer. The default for `timeout_s` is the connection's own timeout.
        """
        self.notify(call)
        return self._answer(call, expected, timeout_s)

    @abstractmethod
    def notify(self, message: RemoteCall | Notice) -> None:
        """Send a message without waiting for an answer. Raises PoolError if the message is too large."""

    @abstractmethod
    def _receive(self) -> FromRemotePool:
        """Return the next message. Raises ConnectionError or TimeoutError if none arrives."""

    def _answer(self, call: RemoteCall, expected: type[Expected], timeout_s: float | None) -> Expected:
        self._set_timeout(socket.SO_RCVTIMEO, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                answer = self._receive()
            except msgspec.MsgspecError as error:
                raise self._broken(str(error)) from None
            if isinstance(answer, Detached):
                self.is_open = False
                raise PoolError(f"{self.url.text} ended the session: {answer.reason}")
            if self._await_space is not None and answer.call_id == self._await_space.call_id:
                self._await_space = None
            if answer.call_id != call.call_id:
                continue  # the answer to a call whose caller has stopped waiting
            if isinstance(answer, CallFailed):
                raise answer.error(f"this client and the pool at {self.url.text} must agree")
            if not isinstance(answer, expected):
                raise self._broken(f"{type(answer).__name__} to {type(call).__name__}")
            return answer

    def close(self) -> None:
        """End the session. The pool releases its reservations and leases. Idempotent."""
        self.is_open = False
        self._sock.close()

    # -- blocks -----------------------------------------------------------------------------------

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], layers: range) -> list[bool]:
        """Copy `layers` of each block that this pool has intact.

        Returns for each block whether it was copied; the buffer of a block that was not copied may have
        changed.
        """
        is_there: list[bool] = []
        for part in self.parts(len(keys)):
            is_there += self._get_part(keys[part], buffers[part], layers)
        return is_there

    @abstractmethod
    def _get_part(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], layers: range) -> list[bool]:
        """Copy one of the slices into which `get` divides its blocks. Returns what `get` returns.

        A slice is so small that its lease leaves room in a small pool.
        """

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], timeout_s: float) -> None:
        """Store blocks of distinct keys.

        Waits up to `timeout_s` seconds for pages, then raises PoolFullError.
        """

    @abstractmethod
    def put_layers(self, keys: Sequence[BlockKey], copy: CopyLayers, timeout_s: float) -> None:
        """Store blocks of distinct keys, layer by layer as `copy` copies them."""

    def layer_groups(self, num_blocks: int) -> Iterator[range]:
        """Yield consecutive ranges of layers. Layers of one range are copied and committed together."""
        stride = -(-_WRITTEN_BYTES // (num_blocks * self.layout.layer_bytes))
        stride = max(1, min(stride, COMMIT_BYTES // (num_blocks * CHECKSUM_BYTES)))
        num_layers = self.layout.num_layers
        return (range(start, min(start + stride, num_layers)) for start in range(0, num_layers, stride))

    def reserve(self, keys: Sequence[BlockKey], timeout_s: float) -> Reservation:
        """Return a reservation with a page for each key: the page of the sealed block, or a page to write.

        Waits up to `timeout_s` seconds for pages. Raises PoolFullError, or PoolError if there will never be
        room.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.call(ReservePages(self.next_id(), list(keys), 0), Reservation)
            except PoolFullError as error:
                left_s, space_epoch = deadline - time.monotonic(), error.space_epoch
                full = PoolFullError(f"no room for {len(keys)} blocks within {timeout_s:g} s: {error}")
            if left_s <= 0:
                raise full
            try:
                self._wait_for_space(space_epoch, left_s)
            except TimeoutError:
                raise full from None

    def _wait_for_space(self, space_epoch: int, timeout_s: float) -> None:
        # A call without an answer is used again: a client whose puts time out has one such call, not many.
        if self._await_space is None:
            self._await_space = AwaitSpace(self.next_id(), space_epoch)
            self.notify(self._await_space)
        self._answer(self._await_space, Done, timeout_s)

    def parts(self, num_blocks: int) -> list[slice]:
        """Return slices of a batch, each of at most a quarter of the pool's pages."""
        stride = max(1, min(self.num_pages // 4, max_keys(self.layout.num_layers)))
        return [slice(start, start + stride) for start in range(0, num_blocks, stride)]

    def release(self, reservation_id: int) -> None:
        self.call(Release(self.next_id(), reservation_id), Done)

    def report_damaged(self, keys: list[BlockKey]) -> None:
        """Have the pool verify these blocks, and drop damaged blocks."""
        if keys:
            self.call(VerifyBlocks(self.next_id(), keys), Verified)

    # ---------------------------------------------------------------------------------------------

    def _set_timeout(self, option: int, timeout_s: float) -> None:
        """Set the seconds that one send or receive may take.

        The timeout is set in the kernel, as Python's own timeouts cost a poll before every call.
        """
        if timeout_s != self._timeouts_s.get(option):
            seconds = int(timeout_s)
            timeval = _TIMEVAL.pack(seconds, max(_LEAST_TIMEOUT_US, int((timeout_s - seconds) * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._timeouts_s[option] = timeout_s

    def _silent(self, option: int) -> TimeoutError:
        """Return the error of a timeout that has passed."""
        return TimeoutError(f"{self.url.text} has been silent for {self._timeouts_s[option]:g} s")

    def _gone(self, reason: object) -> ConnectionResetError:
        return ConnectionResetError(f"{self.url.text} is gone: {reason}")

    def _broken(self, what: str) -> PoolError:
        """End the session, and return the error of a peer that has broken the protocol."""
        self.is_open = False
        return PoolError(f"{self.url.text} answered what it should not: {what}")


_connections: "weakref.WeakSet[PoolConnection]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close a forked child's copies of the sockets: open copies would keep the parent's sessions open."""
    for connection in _connections:
        connection.is_open = False
        connection._sock.close()


os.register_at_fork(after_in_child=_leave_to_parent)
