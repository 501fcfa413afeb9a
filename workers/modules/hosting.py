"""The helper's side: pages of modules for owners on the same host, and what is computed with them.

Hosted pages take the memory of pages of this instance's own KVCache, which are lent for that time. Each
hosting has a thread, beside the device's own, so that neither waits for the other.

Owns: the listener, hostings, the lent pages. Does not know: requests, whose modules come when.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mooncake.messages.quantities import Count
from mooncake.node.mapping import allocate
from mooncake.node.segments import available_bytes
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.errors import ModulesStayError
from workers.execution.jobs import wait_to_end
from workers.modules.link_messages import (
    LINK_VERSION,
    LONGEST_MESSAGE_BYTES,
    Hosting,
    HostingRefused,
    HostModules,
)
from workers.modules.shared_parts import Hosted, share_of, shared_part

KEPT_SHARE = 0.25
"""Share of the helper's pages that stay free for its own requests when modules come."""
_MIB = 1 << 20
_MOST_WAITING = 16
log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(HostModules)


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
    ) -> None:
        """Prepare without hostings.

        The socket listens at `path`, in a directory that only this user can access. `most_pages` returns how
        many pages a request of this instance may need, `has_helper` whether modules of this instance are at a
        helper, or moving there.
        """
        self._name, self._path, self._fingerprint = name, path, fingerprint
        self._model, self._kv, self._most_pages, self._has_helper = model, kv, most_pages, has_helper
        self._requests: dict[str, HostModules] = {}
        """The hostings, by the owner's name."""

    @property
    def num_hosted(self) -> dict[str, Count]:
        """The number of hosted heads of each owner, by name; 0 for an owner whose layers are hosted."""
        return {owner: request.num_heads for owner, request in self._requests.items()}

    async def run(self) -> None:
        """Listen until cancelled. Then no hosting is left, and all pages are this instance's own again."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # of an earlier session
            listener.bind(self._path)
            listener.listen(_MOST_WAITING)
            async with asyncio.TaskGroup() as group:
                while True:
                    sock, _ = await loop.sock_accept(listener)
                    group.create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Host what one owner asks for, until either side ends."""
        loop = asyncio.get_running_loop()
        with sock, contextlib.suppress(ConnectionError):
            request = _request(await loop.sock_recv(sock, LONGEST_MESSAGE_BYTES))
            if request is None:
                return
            try:
                async with self._hosted(request) as (fd, num_pages, ended):
                    answer = msgspec.msgpack.encode(Hosting(num_pages))
                    socket.send_fds(sock, [answer], [fd])
                    log.info("%s of %s are here", request.what, request.owner)
                    await _first_of(ended, loop.create_task(loop.sock_recv(sock, 1)))
            except (ModulesStayError, OSError) as error:
                sock.send(msgspec.msgpack.encode(HostingRefused(str(error))))

    @contextlib.asynccontextmanager
    async def _hosted(self, request: HostModules) -> AsyncIterator[tuple[int, int, "asyncio.Future[None]"]]:
        """Make a context in which modules are hosted. It yields the memory's descriptor, the number of its
        pages, and the end of the thread."""
        num_pages = self._num_pages_for(request)
        part = shared_part(request, num_pages, self._model, self._kv)
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "hosted-modules", self._model.library.be_guest)
        fd = os.memfd_create("mooncake-modules")
        lent = self._kv.lend(math.ceil(num_pages * share_of(request, self._model)))
        self._requests[request.owner] = request
        try:
            self._check_memory(part.memory.size_bytes)
            await wait_to_end(loop.run_in_executor(thread, allocate, fd, part.memory.size_bytes))
            hosted = part.host(fd)
            ended = loop.run_in_executor(thread, _serve, hosted, request.owner)
            try:
                yield fd, num_pages, ended
            finally:
                hosted.close()
                await wait_to_end(ended)
        finally:
            thread.shutdown(wait=False)
            os.close(fd)
            del self._requests[request.owner]
            self._kv.end_loan(lent)
            log.info("%s of %s are gone", request.what, request.owner)

    def _num_pages_for(self, request: HostModules) -> int:
        """Return how many pages can be hosted. Raises ModulesStayError."""
        if request.version != LINK_VERSION or request.fingerprint != self._fingerprint:
            raise ModulesStayError(f"{self._name} runs another release, or another model")
        share = share_of(request, self._model)
        if self._has_helper():
            raise ModulesStayError(f"heads or layers of {self._name} are elsewhere themselves")
        if request.owner in self._requests:
            raise ModulesStayError(
                f"{self._requests[request.owner].what} of {request.owner} are at {self._name} already"
            )
        kv = self._kv
        num_kept, num_longest = round(KEPT_SHARE * kv.num_usable_pages), self._most_pages()
        num_lendable = max(0, min(kv.num_free_pages - num_kept, kv.num_usable_pages - num_longest))
        num_pages = math.floor(num_lendable / share)
        if num_pages < request.least_pages:
            raise ModulesStayError(
                f"{self._name} has no room: {request.what} in {request.least_pages} pages take "
                f"{math.ceil(request.least_pages * share)} of its pages, and it can lend"
                f" {num_lendable} ({kv.num_free_pages} of {kv.num_usable_pages} are free,"
                f" {num_kept} stay free for its requests, the longest of which may need {num_longest})"
            )
        return min(num_pages, request.wanted_pages)

    def _check_memory(self, num_bytes: int) -> None:
        """Raise ModulesStayError unless `num_bytes` of memory are available. The memory of lent pages has
        been freed before."""
        free_bytes = available_bytes()
        if free_bytes is not None and num_bytes > free_bytes:
            raise ModulesStayError(
                f"{self._name} has no memory: what moves takes {num_bytes // _MIB} MiB, of which"
                f" {free_bytes // _MIB} MiB are available"
            )


def _request(payload: bytes) -> HostModules | None:
    """Return an owner's request; None if the owner has gone, or the request cannot be decoded."""
    try:
        return _decoder.decode(payload) if payload else None
    except msgspec.MsgspecError as error:
        log.warning("an owner of KV heads or layers asks for something that cannot be read: %s", error)
        return None


async def _first_of(ended: "asyncio.Future[None]", owner_speaks: "asyncio.Task[bytes]") -> None:
    """Wait until the thread or the connection has ended, on which an owner sends nothing after its
    request."""
    try:
        either: list[asyncio.Future[Any]] = [ended, owner_speaks]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        owner_speaks.cancel()


def _serve(hosted: Hosted, owner: str) -> None:
    """Answer passes until the exchange is closed. A pass that cannot be computed closes it."""
    try:
        hosted.serve()
    except (ValueError, IndexError, RuntimeError, MemoryError) as error:
        log.error("hosting of what %s has here ends: %s", owner, error)
    finally:
        hosted.close()
