"""A TCP proxy on the loopback interface, in the event loop of its test, that can break connections."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass
class Plan:
    """The faults of a proxied connection. "Up" is the direction to the receiver."""

    reset_up_at: int | None = None
    reset_down_at: int | None = None
    stall_up_at: int | None = None
    """The number of bytes after which nothing is forwarded upwards any more, not even the end."""
    flip_up_at: int | None = None
    flip_down_at: int | None = None


@dataclass(eq=False)
class Link:
    """A proxied connection."""

    plan: Plan
    near: socket.socket
    far: socket.socket
    num_up: int = 0
    num_down: int = 0
    is_open: bool = True

    def reset(self) -> None:
        if self.is_open:
            self.is_open = False
            for sock in (self.near, self.far):
                asyncio.get_running_loop().remove_reader(sock)
                asyncio.get_running_loop().remove_writer(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()


class Proxy:
    """A proxy that forwards TCP connections to `place`."""

    def __init__(self, tasks: asyncio.TaskGroup, place: tuple[str, int]) -> None:
        self.plans: list[Plan] = []
        """The plans of the next connections, in order. Connections after them have no faults."""
        self.links: list[Link] = []
        self.up_flows, self.down_flows = asyncio.Event(), asyncio.Event()
        self.piece_bytes = 1 << 16
        self.pause_s = 0.0
        self._tasks = tasks
        self._place = place
        self._listener = listen(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        self._accepting = tasks.create_task(self._accept())
        self.heal()

    def black_hole(self, *, up: bool = True, down: bool = True) -> None:
        """Forward nothing any more, without any error. New connections get no answer."""
        for is_lost, flows in ((up, self.up_flows), (down, self.down_flows)):
            if is_lost:
                flows.clear()

    def heal(self) -> None:
        self.up_flows.set()
        self.down_flows.set()

    def slow(self, piece_bytes: int, pause_s: float) -> None:
        self.piece_bytes, self.pause_s = piece_bytes, pause_s

    def reset(self) -> None:
        """Reset all connections."""
        for link in self.links:
            link.reset()

    def refuse(self) -> None:
        """Refuse new connections."""
        self._accepting.cancel()
        self._listener.close()

    def accept_again(self) -> None:
        self._listener = listen(self.endpoint)
        self._accepting = self._tasks.create_task(self._accept())

    def close(self) -> None:
        self.refuse()
        self.reset()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            far = socket.socket()
            far.setblocking(False)
            link = Link(self.plans.pop(0) if self.plans else Plan(), near, far)
            self.links.append(link)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await loop.sock_connect(far, self._place)
            except OSError:
                link.reset()
                continue
            self._tasks.create_task(self._forward(link, up=True))
            self._tasks.create_task(self._forward(link, up=False))

    async def _forward(self, link: Link, *, up: bool) -> None:
        loop, plan = asyncio.get_running_loop(), link.plan
        source, sink = (link.near, link.far) if up else (link.far, link.near)
        flows = self.up_flows if up else self.down_flows
        reset_at, flip_at = (
            (plan.reset_up_at, plan.flip_up_at) if up else (plan.reset_down_at, plan.flip_down_at)
        )
        num_forwarded = 0
        try:
            while reset_at is None or num_forwarded < reset_at:
                most = (
                    self.piece_bytes if reset_at is None else min(self.piece_bytes, reset_at - num_forwarded)
                )
                piece = bytearray(await loop.sock_recv(source, most))
                await flows.wait()
                if up and plan.stall_up_at is not None:
                    piece = piece[: plan.stall_up_at - num_forwarded]
                    if not piece:
                        await asyncio.Event().wait()
                if not piece:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                if flip_at is not None and 0 <= flip_at - num_forwarded < len(piece):
                    piece[flip_at - num_forwarded] ^= 1
                await loop.sock_sendall(sink, piece)
                num_forwarded += len(piece)
                if up:
                    link.num_up = num_forwarded
                else:
                    link.num_down = num_forwarded
            link.reset()
        except OSError:
            link.reset()


@contextlib.asynccontextmanager
async def proxied(place: tuple[str, int]) -> AsyncIterator[Proxy]:
    """Make a context with a proxy. It ends with all its connections."""
    proxies: asyncio.Queue[Proxy] = asyncio.Queue()

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            proxies.put_nowait(Proxy(tasks, place))
            await asyncio.Event().wait()

    living = asyncio.create_task(live())
    proxy = await proxies.get()
    try:
        yield proxy
    finally:
        proxy.close()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)


def listen(place: tuple[str, int] | str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
    if not isinstance(place, str):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen()
    listener.setblocking(False)
    return listener
