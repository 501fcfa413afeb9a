"""The helper's side of modules: it hosts them for owners on this and other hosts, and computes with them.

Hosted pages take the memory of pages of this instance's own KVCache, which are lent for that time. Each
hosting has a thread beside the device thread, so that neither waits for the other.

Owns: the listener, hostings, the lent pages. Does not know: requests, why and when modules come.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from kernels.cpu.mailbox import Wire
from mooncake.messages.quantities import Count
from mooncake.node.mapping import allocate
from mooncake.node.memory import available_bytes
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.errors import ModulesStayError
from workers.execution.jobs import wait_to_end
from workers.modules import connections
from workers.modules.connections import Owners
from workers.modules.link_messages import (
    LINK_VERSION,
    LONGEST_MESSAGE_BYTES,
    FromOwner,
    Hosting,
    HostingRefused,
    HostModules,
    Join,
    Memory,
    Purpose,
)
from workers.modules.remote_pages import PagesServer
from workers.modules.shared_parts import Hosted, SharedPart, share_of, shared_part

KEPT_SHARE = 0.25
"""Share of the helper's pages that stay free for its own requests when modules come."""
_MIB = 1 << 20
_MOST_WAITING = 16
_TOKEN_BYTES = 16
_JOIN_TIMEOUT_S = 30.0
"""Seconds in which an owner on another host must have opened the connections for passes and pages."""
log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(FromOwner)


class ModulesHost:
    """The hostings of the instance `name`, for owners with the same model, while `run` runs."""

    def __init__(
        self,
        name: str,
        path: str,
        fingerprint: str,
        model: DecoderModel,
        kv: DeviceKVCache,
        most_pages: Callable[[], int],
        has_helper: Callable[[], bool],
        owners: Owners | None = None,
    ) -> None:
        """Prepare without hostings.

        Owners of this host connect to a socket at `path`, in a directory that only this user can access;
        `owners` are those on other hosts. `most_pages` returns how many pages a request of this instance may
        need. `has_helper` returns whether modules of this instance are at a helper, or moving there.
        """
        self._name, self._path, self._fingerprint = name, path, fingerprint
        self._model, self._kv, self._most_pages, self._has_helper = model, kv, most_pages, has_helper
        self._owners = owners
        self._requests: dict[str, HostModules] = {}
        """The hostings, by the owner's name."""
        self._joining: dict[tuple[bytes, Purpose], asyncio.Future[socket.socket]] = {}
        """Connections that owners on other hosts have yet to open, by the hosting's token and the purpose."""

    @property
    def num_hosted(self) -> dict[str, Count]:
        """The number of hosted heads by the owner's name; 0 for an owner that has other modules here."""
        return {owner: request.part.num_heads for owner, request in self._requests.items()}

    async def run(self) -> None:
        """Listen until cancelled. When this returns, no hosting is left and no page is lent."""
        async with asyncio.TaskGroup() as group:
            if self._owners is not None:
                group.create_task(self._owners.run(self._serve_remote))
            await self._accept(group)

    async def _accept(self, group: asyncio.TaskGroup) -> None:
        """Accept owners of this host."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # left by an earlier session
            listener.bind(self._path)
            listener.listen(_MOST_WAITING)
            while True:
                sock, _ = await loop.sock_accept(listener)
                group.create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Host what one owner of this host asks for, until either side ends."""
        loop = asyncio.get_running_loop()
        with sock, contextlib.suppress(ConnectionError):
            request = _request(await loop.sock_recv(sock, LONGEST_MESSAGE_BYTES))
            if not isinstance(request, HostModules):
                return
            try:
                async with self._lent(request) as lent, lent.serving(lent.part.host(lent.memory)) as ended:
                    answer = msgspec.msgpack.encode(Hosting(lent.num_pages))
                    socket.send_fds(sock, [answer], [lent.fd])
                    await _end_of(sock, ended)
            except (ModulesStayError, OSError) as error:
                sock.send(msgspec.msgpack.encode(HostingRefused(str(error))))

    async def _serve_remote(self, sock: socket.socket, first: bytes) -> None:
        """Host what one owner on another host asks for. A connection with `Join` is passed to the hosting."""
        with contextlib.suppress(OSError):
            match _request(first):
                case HostModules() as request:
                    try:
                        async with self._lent(request, is_remote=True) as lent:
                            await self._host_remote(sock, lent)
                    except (ModulesStayError, OSError) as error:
                        await connections.send(sock, HostingRefused(str(error)))
                case Join(token=token, purpose=purpose):
                    joined = self._joining.pop((token, purpose), None)
                    if joined is not None and not joined.done():
                        joined.set_result(sock.dup())

    async def _host_remote(self, sock: socket.socket, lent: "_Lent") -> None:
        loop, token = asyncio.get_running_loop(), secrets.token_bytes(_TOKEN_BYTES)
        joining = {(token, purpose): loop.create_future() for purpose in Purpose}
        self._joining |= joining
        with contextlib.ExitStack() as stack:
            try:
                await connections.send(sock, Hosting(lent.num_pages, token))
                async with asyncio.timeout(_JOIN_TIMEOUT_S):
                    joined = asyncio.gather(*joining.values())
                    await _end_of(sock, joined)
                    if not joined.done():
                        raise ModulesStayError(f"{lent.request.owner} has gone")
                    passes, pages = await joined
            except TimeoutError:
                raise ModulesStayError(f"{lent.request.owner} has not opened all connections") from None
            finally:
                for awaited in joining:
                    self._joining.pop(awaited, None)
                for future in joining.values():
                    if future.done() and not future.cancelled():
                        stack.callback(future.result().close)
            server = PagesServer(self._model.library, pages, lent.part.layout.pages, lent.memory.layers)
            hosted = lent.part.host(lent.memory, Wire(passes, None))
            async with lent.serving(hosted) as ended, lent.serving(server) as pages_ended:
                await _end_of(sock, ended, pages_ended)

    @contextlib.asynccontextmanager
    async def _lent(self, request: HostModules, *, is_remote: bool = False) -> AsyncIterator["_Lent"]:
        """Make a context in which pages are lent, and the memory of modules is allocated."""
        num_pages = self._num_pages_for(request)
        part = shared_part(request, num_pages, self._model, self._kv)
        fd = os.memfd_create("mooncake-modules")
        lent = self._kv.lend(math.ceil(num_pages * share_of(request, self._model)))
        self._requests[request.owner] = request
        try:
            staged_bytes = part.layout.pages.staged_bytes if is_remote else 0
            self._check_memory(part.layout.size_bytes + staged_bytes)
            given_up = threading.Event()
            allocating = asyncio.to_thread(allocate, fd, part.layout.size_bytes, given_up.is_set)
            await wait_to_end(asyncio.ensure_future(allocating), given_up.set)
            log.info("%s of %s are here", request.part.what, request.owner)
            yield _Lent(request, part, num_pages, fd, part.layout.map(fd), self._model.library.be_guest)
        finally:
            os.close(fd)
            del self._requests[request.owner]
            self._kv.end_loan(lent)
            log.info("%s of %s are gone", request.part.what, request.owner)

    def _num_pages_for(self, request: HostModules) -> int:
        """Return how many pages can be hosted. Raises ModulesStayError."""
        if request.version != LINK_VERSION or request.fingerprint != self._fingerprint:
            raise ModulesStayError(f"{self._name} runs another release, or another model")
        share = share_of(request, self._model)
        if self._has_helper():
            raise ModulesStayError(f"modules of {self._name} are elsewhere themselves")
        if request.owner in self._requests:
            raise ModulesStayError(
                f"{self._requests[request.owner].part.what} of {request.owner} are at {self._name} already"
            )
        kv = self._kv
        num_kept, num_longest = round(KEPT_SHARE * kv.pages.num_usable), self._most_pages()
        num_lendable = max(0, min(kv.pages.num_free - num_kept, kv.pages.num_usable - num_longest))
        num_pages = math.floor(num_lendable / share)
        if num_pages < request.least_pages:
            raise ModulesStayError(
                f"{self._name} has no room: {request.part.what} in {request.least_pages} pages take "
                f"{math.ceil(request.least_pages * share)} of its pages, and it can lend"
                f" {num_lendable} ({kv.pages.num_free} of {kv.pages.num_usable} are free,"
                f" {num_kept} stay free for its requests, the longest of which may need {num_longest})"
            )
        return min(num_pages, request.wanted_pages)

    def _check_memory(self, num_bytes: int) -> None:
        """Raise ModulesStayError unless `num_bytes` of memory are available.

        The memory of lent pages has been freed before, and counts as available.
        """
        free_bytes = available_bytes()
        if free_bytes is not None and num_bytes > free_bytes:
            raise ModulesStayError(
                f"{self._name} has no memory: what moves takes {num_bytes // _MIB} MiB, of which"
                f" {free_bytes // _MIB} MiB are available"
            )


class _Lent(NamedTuple):
    """The memory of one hosting, in `num_pages` pages, at the descriptor `fd`.

    `be_guest` is called once on each thread that computes for the owner.
    """

    request: HostModules
    part: SharedPart
    num_pages: int
    fd: int
    memory: Memory
    be_guest: Callable[[], None]

    @contextlib.asynccontextmanager
    async def serving(self, hosted: Hosted) -> AsyncIterator["asyncio.Future[None]"]:
        """Make a context in which a thread answers the owner. Yields a future of the thread's end."""
        thread = ThreadPoolExecutor(1, "hosted-modules", self.be_guest)
        ended = asyncio.get_running_loop().run_in_executor(thread, _answer, hosted, self.request.owner)
        try:
            yield ended
        finally:
            hosted.close()
            await wait_to_end(ended)
            thread.shutdown(wait=False)


def _request(payload: bytes) -> FromOwner | None:
    """Return an owner's request; None if the owner has gone, or the request cannot be decoded."""
    try:
        return _decoder.decode(payload) if payload else None
    except msgspec.MsgspecError as error:
        log.warning("an owner of modules asks for something that cannot be read: %s", error)
        return None


async def _end_of(sock: socket.socket, *others: "asyncio.Future[Any]") -> None:
    """Wait until the connection or one of `others` has ended. An owner sends nothing after its request."""

    async def owner_speaks() -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_recv(sock, 1)

    speaking = asyncio.create_task(owner_speaks())
    try:
        await asyncio.wait((speaking, *others), return_when=asyncio.FIRST_COMPLETED)
    finally:
        speaking.cancel()


def _answer(hosted: Hosted, owner: str) -> None:
    """Answer passes until the exchange is closed. A pass that cannot be computed closes the exchange."""
    try:
        hosted.serve()
    except (ValueError, IndexError, RuntimeError, MemoryError) as error:
        log.error("hosting of what %s has here ends: %s", owner, error)
    finally:
        hosted.close()
