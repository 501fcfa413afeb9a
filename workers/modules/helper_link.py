"""The connection between the owner of modules and its helper, at the owner's end.

Owns: the socket, this side's mapping of the shared memory. Does not know: when modules move, what is
computed.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from workers.engine.kvcache import DeviceKVCache, HostedLayers, MovedHeads
from workers.engine.model import DecoderModel
from workers.errors import ModulesStayError
from workers.modules.link_messages import (
    LONGEST_MESSAGE_BYTES,
    FromHelper,
    Hosting,
    HostingRefused,
    HostModules,
)
from workers.modules.shared_parts import shared_part

_ANSWER_TIMEOUT_S = 60.0
"""Seconds in which the helper must answer, after allocating the memory."""
_END_TIMEOUT_S = 10.0
"""Seconds to wait for the helper's confirmation that a hosting has ended."""
_decoder = msgspec.msgpack.Decoder(FromHelper)


class HelperLink:
    """A helper that hosts modules, until `close` or the helper's own end. `on_lost` is called once when the
    helper ends first."""

    def __init__(
        self,
        sock: socket.socket,
        helped: MovedHeads | HostedLayers,
        num_pages: int,
        on_lost: Callable[[], None],
    ) -> None:
        self.helped, self.num_pages = helped, num_pages
        self._sock, self._on_lost = sock, on_lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)
        self.is_lost = False
        """Whether the helper has gone. What it hosted is still mapped here."""

    @classmethod
    async def connect(
        cls,
        path: str,
        request: HostModules,
        model: DecoderModel,
        kv: DeviceKVCache,
        timeout_s: float,
        on_lost: Callable[[], None],
    ) -> "HelperLink":
        """Connect to the helper that listens at `path`. A helper that takes longer than `timeout_s` for a
        layer counts as lost.

        Raises ModulesStayError, with the helper's reason if it refuses.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, path)
                sock.send(msgspec.msgpack.encode(request))
                await _readable(sock)
                payload, fds, _, _ = socket.recv_fds(sock, LONGEST_MESSAGE_BYTES, 1)
            hosting = _hosting(payload)
            with contextlib.ExitStack() as stack:
                for fd in fds:
                    stack.callback(os.close, fd)
                helped = shared_part(request, hosting.num_pages, model, kv).own(fds[0], timeout_s)
            return cls(sock, helped, hosting.num_pages, on_lost)
        except (OSError, TimeoutError, IndexError) as error:
            sock.close()
            raise ModulesStayError(
                f"the helper does not answer at {path}: {str(error) or type(error).__name__}"
            ) from None
        except BaseException:
            sock.close()
            raise

    async def end(self) -> None:
        """End the hosting, and wait until the helper has its pages back."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self.helped.owner.close()
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    self._sock.shutdown(socket.SHUT_WR)
                    async with asyncio.timeout(_END_TIMEOUT_S):
                        await _readable(self._sock)
            finally:
                self._sock.close()

    def close(self) -> None:
        """End the hosting. Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self.helped.owner.close()
            self._sock.close()

    def _on_readable(self) -> None:
        """Handle the end of the connection, on which a helper sends nothing after its answer."""
        self.is_lost = True
        self.close()
        self._on_lost()


def _hosting(payload: bytes) -> Hosting:
    if not payload:
        raise ModulesStayError("the helper has ended")
    try:
        answer: Hosting | HostingRefused = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ModulesStayError(f"the helper's answer cannot be read: {error}") from None
    if isinstance(answer, HostingRefused):
        raise ModulesStayError(answer.reason)
    return answer


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, note)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
