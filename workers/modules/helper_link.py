"""The connection between the owner of modules and its helper, at the owner's end.

Owns: the connections, this side's mapping of shared memory. Does not know: when modules move, what is
computed.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kernels.cpu.mailbox import Wire
from mooncake.errors import TransferError
from mooncake.security.keys import ClusterKey
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import Helped
from workers.engine.model import DecoderModel
from workers.errors import ModulesStayError
from workers.modules import connections
from workers.modules.link_messages import (
    LONGEST_MESSAGE_BYTES,
    FromHelper,
    Hosting,
    HostingRefused,
    HostModules,
    Join,
    Purpose,
)
from workers.modules.remote_pages import PagesClient
from workers.modules.shared_parts import shared_part

_ANSWER_TIMEOUT_S = 60.0
"""Seconds within which the helper must allocate the memory of the modules, and answer."""
_END_TIMEOUT_S = 10.0
"""Seconds to wait for the helper's confirmation that a hosting has ended."""
_decoder = msgspec.msgpack.Decoder(FromHelper)


class _Connected(NamedTuple):
    """A connection, and the part that is hosted in `num_pages` pages until the connection ends."""

    sock: socket.socket
    helped: Helped
    num_pages: int
    pages_lost: "asyncio.Future[None]"
    """Done once the pages of a helper on another host cannot be reached, without which it is of no use."""


@dataclass(frozen=True, slots=True)
class HelperAccess:
    """The settings of an owner's connections to helpers."""

    key: ClusterKey
    timeout_s: float
    """Seconds within which a helper must compute a layer and take bytes; else it counts as lost."""


class HelperLink:
    """A helper that hosts modules, until `end`, `close`, or the helper's own end.

    `on_lost` is called if the helper ends first, or if its pages cannot be reached any more. The modules are
    in `num_pages` pages.
    """

    def __init__(self, connected: _Connected, on_lost: Callable[[], None]) -> None:
        self.helped, self.num_pages = connected.helped, connected.num_pages
        self._sock, self._pages_lost, self._on_lost = connected.sock, connected.pages_lost, on_lost
        self._loop = asyncio.get_running_loop()
        self._is_exchanging = True
        """Whether passes can be sent to the helper: the helper is not lost, and the hosting has not ended."""
        self._loop.add_reader(self._sock, self._on_closed_by_helper)
        self._pages_lost.add_done_callback(lambda _: self._count_as_lost())
        self.is_lost = False
        """Whether the helper was lost. The memory of a helper on this host is still mapped here then."""

    @classmethod
    async def connect(
        cls,
        address: str,
        request: HostModules,
        model: DecoderModel,
        kv: DeviceKVCache,
        access: HelperAccess,
        on_lost: Callable[[], None],
    ) -> "HelperLink":
        """Connect to the helper that listens at `address`: the path of a Unix socket, or a TCP endpoint.

        Raises ModulesStayError, with the helper's reason if it refuses.
        """
        connect = _connect_remote if connections.is_remote(address) else _connect_local
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                connected = await connect(address, request, model, kv, access)
        except (OSError, TimeoutError, IndexError, TransferError) as error:
            raise ModulesStayError(
                f"the helper does not answer at {address}: {str(error) or type(error).__name__}"
            ) from None
        return cls(connected, on_lost)

    async def end(self) -> None:
        """End the hosting, and wait until the helper has its pages back, at most `_END_TIMEOUT_S`."""
        if self._sock.fileno() >= 0:
            self._stop_exchange()
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    self._sock.shutdown(socket.SHUT_WR)
                    async with asyncio.timeout(_END_TIMEOUT_S):
                        await _readable(self._sock)
            finally:
                self._sock.close()

    def close(self) -> None:
        """End the hosting without waiting for the helper. Idempotent."""
        if self._sock.fileno() >= 0:
            self._stop_exchange()
            self._sock.close()

    def _stop_exchange(self) -> None:
        """Send no more passes, and watch the helper no longer. Idempotent."""
        if self._is_exchanging:
            self._is_exchanging = False
            self._loop.remove_reader(self._sock)
            self._pages_lost.cancel()  # its callback keeps this object, and with it the mapped memory
            self.helped.owner.close()
            if self.helped.remote is not None:
                self.helped.remote.close()

    def _count_as_lost(self) -> None:
        """Count the helper as lost, unless the hosting has ended. The connection stays open. Idempotent."""
        if self._is_exchanging:
            self._stop_exchange()
            self.is_lost = True
            self._on_lost()

    def _on_closed_by_helper(self) -> None:
        """Handle the end of the connection: a helper sends nothing after its answer, and has closed it."""
        self._count_as_lost()
        self.close()


async def _connect_local(
    path: str, request: HostModules, model: DecoderModel, kv: DeviceKVCache, access: HelperAccess
) -> _Connected:
    """Connect to a helper of this host, and map its memory.

    Raises OSError, and the errors of `HelperLink.connect`.
    """
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        )
        await asyncio.get_running_loop().sock_connect(sock, path)
        sock.send(msgspec.msgpack.encode(request))
        await _readable(sock)
        payload, fds, _, _ = socket.recv_fds(sock, LONGEST_MESSAGE_BYTES, 1)
        hosting = _hosting(payload, request)
        with contextlib.ExitStack() as stack:
            for fd in fds:
                stack.callback(os.close, fd)
            part = shared_part(request, hosting.num_pages, model, kv)
            helped = part.own(part.layout.map(fds[0]), access.timeout_s)
        opened.pop_all()
        return _Connected(sock, helped, hosting.num_pages, asyncio.get_running_loop().create_future())


async def _connect_remote(
    endpoint: str, request: HostModules, model: DecoderModel, kv: DeviceKVCache, access: HelperAccess
) -> _Connected:
    """Connect to a helper on another host.

    Raises OSError, TransferError, and the errors of `HelperLink.connect`.
    """
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(await connections.connect(endpoint, access.key))
        await connections.send(sock, request)
        hosting = _hosting(await connections.receive(sock), request)
        joined = {}
        for purpose in Purpose:
            joined[purpose] = opened.enter_context(await connections.connect(endpoint, access.key))
            await connections.send(joined[purpose], Join(hosting.token, purpose))
        part = shared_part(request, hosting.num_pages, model, kv)
        loop = asyncio.get_running_loop()
        pages_lost: asyncio.Future[None] = loop.create_future()

        def note() -> None:
            if not pages_lost.done():
                pages_lost.set_result(None)

        def on_lost() -> None:  # on the thread of a call that fails
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(note)

        pages = PagesClient(joined[Purpose.PAGES], part.layout.pages, access.timeout_s, on_lost)
        wire = Wire(joined[Purpose.PASSES], access.timeout_s)
        helped = part.own(part.layout.mailbox_alone(), access.timeout_s, wire, pages)
        opened.pop_all()
        return _Connected(sock, helped, hosting.num_pages, pages_lost)


def _hosting(payload: bytes, request: HostModules) -> Hosting:
    """Return the helper's answer.

    Raises ModulesStayError for a refusal, and for an answer that does not fit the request.
    """
    if not payload:
        raise ModulesStayError("the helper has ended")
    try:
        answer: Hosting | HostingRefused = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ModulesStayError(f"the helper's answer cannot be read: {error}") from None
    if isinstance(answer, HostingRefused):
        raise ModulesStayError(answer.reason)
    if not request.least_pages <= answer.num_pages <= request.wanted_pages:
        raise ModulesStayError(f"the helper answers with {answer.num_pages} pages, which were not asked for")
    return answer


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
