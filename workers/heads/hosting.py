"""The helper's side of moved heads: their pages, for owners on the same host, and attention with them.

Hosted pages take the place of pages of this instance's own KVCache, which are lent for as long. Each hosting
has a thread, beside the device's own, so that neither waits for the other.

Owns: the listener, hostings, the lent pages. Does not know: requests, whose heads come when.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kernels.cpu.moved_heads import HeadsHelper
from mooncake.messages.quantities import Count
from mooncake.node.mapping import allocate
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.errors import HeadsStayError
from workers.execution.jobs import wait_to_end
from workers.heads.link_messages import (
    LINK_VERSION,
    LONGEST_MESSAGE_BYTES,
    HostHeads,
    Hosting,
    HostingRefused,
    SharedHeads,
)

KEPT_SHARE = 0.25
"""Share of the helper's pages that stay free for its own requests when heads come."""
_MOST_WAITING = 16
log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(HostHeads)


class HeadsHost:
    """The hostings of one instance, `name`, for owners with the same model, in `run`."""

    def __init__(
        self, name: str, path: str, fingerprint: str, model: DecoderModel, kv: DeviceKVCache
    ) -> None:
        """`path` is where the socket listens: in a directory that only this user can access."""
        self._name, self._path, self._fingerprint = name, path, fingerprint
        self._model, self._kv = model, kv
        self._num_hosted: dict[str, int] = {}

    @property
    def num_hosted(self) -> dict[str, Count]:
        """The number of heads that are hosted for each owner, by name."""
        return dict(self._num_hosted)

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
                    log.info("%d KV heads of %s are here", request.num_heads, request.owner)
                    await _first_of(ended, loop.create_task(loop.sock_recv(sock, 1)))
            except (HeadsStayError, OSError) as error:
                sock.send(msgspec.msgpack.encode(HostingRefused(str(error))))

    @contextlib.asynccontextmanager
    async def _hosted(self, request: HostHeads) -> AsyncIterator[tuple[int, int, "asyncio.Future[None]"]]:
        """Make a context in which heads are hosted. It yields the memory's descriptor, the number of its
        pages, and the end of the thread."""
        num_pages = self._num_pages_for(request)
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "hosted-heads")
        fd = os.memfd_create("mooncake-heads")
        lent = self._kv.lend(self._num_lent(request.num_heads, num_pages))
        self._num_hosted[request.owner] = request.num_heads
        try:
            spec, kv = self._model.spec, self._kv
            shared = SharedHeads(
                request, num_pages, self._model.heads, kv.page_size, len(kv.layers), kv.dtype
            )
            await wait_to_end(loop.run_in_executor(thread, allocate, fd, shared.size_bytes))
            mailbox, layers = shared.map(fd)
            windows = [spec.layer_sliding_window(layer) for layer in kv.layers]
            helper = HeadsHelper(self._model.library, mailbox, shared.mailbox, layers, windows)
            ended = loop.run_in_executor(thread, _host, helper, request.owner)
            try:
                yield fd, num_pages, ended
            finally:
                helper.close()
                await wait_to_end(ended)
        finally:
            thread.shutdown(wait=False)
            os.close(fd)
            del self._num_hosted[request.owner]
            self._kv.end_loan(lent)
            log.info("%d KV heads of %s are gone", request.num_heads, request.owner)

    def _num_pages_for(self, request: HostHeads) -> int:
        """Return for how many pages there is room. Raises HeadsStayError."""
        if request.version != LINK_VERSION or request.fingerprint != self._fingerprint:
            raise HeadsStayError(f"{self._name} runs another release, or another model")
        if request.num_heads >= self._model.spec.num_kv_heads:
            raise HeadsStayError(f"the model has {self._model.spec.num_kv_heads} KV heads")
        if self._kv.moved is not None:
            raise HeadsStayError(f"heads of {self._name} are elsewhere themselves")
        if request.owner in self._num_hosted:
            raise HeadsStayError(f"heads of {request.owner} are at {self._name} already")
        kv = self._kv
        num_kept = round(KEPT_SHARE * kv.num_usable_pages)
        num_lendable = max(0, kv.num_free_pages - num_kept)
        num_pages = num_lendable * self._model.spec.num_kv_heads // request.num_heads
        if num_pages < request.least_pages:
            num_needed = self._num_lent(request.num_heads, request.least_pages)
            raise HeadsStayError(
                f"{self._name} has no room: {request.num_heads} of {self._model.spec.num_kv_heads} KV heads"
                f" of {request.least_pages} pages take {num_needed} of its pages, and it can lend"
                f" {num_lendable} ({kv.num_free_pages} of {kv.num_usable_pages} are free,"
                f" {num_kept} stay free for its requests)"
            )
        return min(num_pages, request.wanted_pages)

    def _num_lent(self, num_heads: int, num_pages: int) -> int:
        return -(-num_pages * num_heads // self._model.spec.num_kv_heads)


def _request(payload: bytes) -> HostHeads | None:
    """Return what an owner asks for; None if it has gone, or cannot be understood."""
    try:
        return _decoder.decode(payload) if payload else None
    except msgspec.MsgspecError as error:
        log.warning("an owner of heads asks for something that cannot be read: %s", error)
        return None


async def _first_of(ended: "asyncio.Future[None]", owner_speaks: "asyncio.Task[bytes]") -> None:
    """Wait until the thread or the connection has ended: an owner says nothing after its request."""
    try:
        either: list[asyncio.Future[Any]] = [ended, owner_speaks]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        owner_speaks.cancel()


def _host(helper: HeadsHelper, owner: str) -> None:
    """Answer passes until the exchange is closed. A pass that does not fit closes it."""
    try:
        while (described := helper.await_pass()) is not None:
            helper.host(described)
    except ValueError as error:
        log.error("hosting heads of %s ends: %s", owner, error)
    finally:
        helper.close()
