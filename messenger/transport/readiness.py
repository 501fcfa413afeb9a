"""Attempts to read from a socket, or to write to it, that are repeated until the socket is ready.

Owns: when an attempt is repeated. Does not know: the data.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from messenger.transport.tls import TlsSocket

Result = TypeVar("Result")


class Readiness:
    """The wait for one direction of a socket: to be readable, or to be writable.

    The socket stays registered with the event loop between two waits, as registering takes system calls. An
    event that comes while nothing waits ends the registration.
    """

    def __init__(
        self,
        sock: "socket.socket | TlsSocket",
        add: Callable[..., None],
        remove: Callable[[int], bool],
        had_turns: Callable[[], None],
    ) -> None:
        """Prepare waits on `sock`. `had_turns` is called when other tasks have run."""
        self._sock = sock
        self._add = add
        self._remove = remove
        self._had_turns = had_turns
        self._is_registered = False
        self._attempt: Callable[[], Any] | None = None
        self._result: asyncio.Future[Any] | None = None

    async def first(self, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` at each event until it raises no BlockingIOError, and return its result.

        Raises ConnectionResetError if the socket is closed, and any other exception of `attempt`.
        """
        if self._sock.fileno() < 0:
            raise ConnectionResetError("connection closed")
        if not self._is_registered:
            self._add(self._sock.fileno(), self._on_event)
            self._is_registered = True
        self._attempt = attempt
        self._result = asyncio.get_running_loop().create_future()
        try:
            result: Result = await self._result
            return result
        finally:
            self._result = self._attempt = None

    def end(self) -> None:
        """End a wait with ConnectionResetError. Must be called before the socket is closed."""
        self.rest()
        if self._result is not None and not self._result.done():
            self._result.set_exception(ConnectionResetError("connection closed"))

    def rest(self) -> None:
        """Stop listening to events until the next wait."""
        if self._is_registered:
            self._remove(self._sock.fileno())
            self._is_registered = False

    def _on_event(self) -> None:
        self._had_turns()
        if self._result is None or self._result.done():
            self.rest()
            return
        assert self._attempt is not None
        try:
            result = self._attempt()
        except BlockingIOError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the waiting
            if not self._result.done():
                self._result.set_exception(error)
        else:
            if not self._result.done():  # the attempt may have cancelled the waiting task
                self._result.set_result(result)
