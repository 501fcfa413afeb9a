"""Two messengers in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from socket import AF_INET, SO_SNDBUF, SOL_SOCKET, socket

import numpy as np

from messenger.rdma.cards import Cards
from messenger.receiver.receiver import Sessions, UnauthenticatedPeers
from messenger.receiver.served_pool import ServedPool
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.sender.requests import Urgency, WriteOutcome
from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from messenger.transport.transports import Traffic
from messenger.wire.identity import Identity, host_id
from messenger.wire.messages import WriteEntry
from mooncake.config.sections import MessengerConfig
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S
from tests.messenger.pages import Memory, Pages
from tests.messenger.proxy import Proxy, listen

KEY = ClusterKey.generate()
FINGERPRINT = "f" * 32
TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=1, dtype="bfloat16")
SMALL = KVLayout(num_layers=4, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")
LARGE = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=256, dtype="bfloat16")
"""A layout with layers of 256 KiB. Four blocks fill one frame exactly."""


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S / 2) -> None:
    """Wait until other tasks of this event loop have made `condition` true."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.001)


class Fabric:
    """A sender and a receiver in one event loop, and the proxies between them."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        folder: Path,
        layout: KVLayout,
        num_pages: int,
        config: MessengerConfig,
        tls: Tls | None,
        cards: tuple[Cards, Cards],
    ) -> None:
        self.tls = tls
        self.cards = cards
        """The RDMA cards of the sender and of the receiver."""
        self.layout = layout
        self.key = KEY
        self.sender_memory, self.receiver_memory = Memory(layout, num_pages), Memory(layout, num_pages)
        self.sender_memory.fill(1)
        self.sent, self.received = Traffic(), Traffic()
        self.receiver_memory.land()
        self.pages = Pages(self.receiver_memory)
        self.receiver_identity = Identity("receiver", 1, host_id(), FINGERPRINT, layout)
        self.sender_identity = identity_with(self.receiver_identity, instance="sender")
        self.config = config
        self.tasks = tasks
        self.proxies: list[Proxy] = []
        served_pool = ServedPool(
            self.receiver_identity,
            KEY,
            self.pages,
            self.pages,
            self.receiver_memory.source,
            self.received,
            config,
            cards[1],
            self.receiver_memory.shared_segment,
        )
        self.sessions = Sessions(served_pool)
        self.unix_path = str(folder / "receiver.sock")
        Path(self.unix_path).unlink(missing_ok=True)
        self._listeners = [listen(("127.0.0.1", 0)), listen(self.unix_path)]
        self.endpoint: tuple[str, int] = self._listeners[0].getsockname()
        self.num_served = 0
        """The number of connections that are being served."""
        self.answer_buffer_bytes: int | None = None
        """The size of the kernel's send buffer for new connections; None for its default."""
        for listener in self._listeners:
            tasks.create_task(self._accept(listener))
        self.peers = self.peers_with(KEY)

    def peers_with(self, key: ClusterKey, **changed: object) -> OutgoingSessions:
        """Return another sender with this `key`, and with `changed` fields in its identity."""
        return OutgoingSessions(
            self.tasks,
            self.sender_memory.source,
            self.sent,
            identity=identity_with(self.sender_identity, **changed),
            key=key,
            tls=self.tls,
            settings=self.config,
            cards=self.cards[0],
        )

    def proxy(self) -> Proxy:
        self.proxies.append(Proxy(self.tasks, self.endpoint))
        return self.proxies[-1]

    @property
    def address(self) -> MessengerAddress:
        """The address of the receiver, with the proxies' endpoints if there are proxies."""
        endpoints = tuple(proxy.endpoint for proxy in self.proxies) or (self.endpoint,)
        identity = self.receiver_identity
        return MessengerAddress(
            identity.instance, identity.incarnation, identity.host_id, self.unix_path, endpoints
        )

    def address_with(self, **changed: object) -> MessengerAddress:
        fields = {name: getattr(self.address, name) for name in MessengerAddress.__struct_fields__}
        return MessengerAddress(**{**fields, **changed})

    @property
    def slots_taken(self) -> set[int]:
        """The copy slots of the receiver that are taken."""
        return set(self.receiver_memory.copy_table._processes)

    async def peer(self, num_lanes: int = 1) -> OutgoingSession:
        """Return the session with the receiver, once it has this number of lanes."""
        peer = await self.peers.peer(self.address)
        await until(lambda: len(peer.lanes) >= num_lanes)
        return peer

    def entry(self, page: int, layers: range | None = None, to_page: int | None = None) -> WriteEntry:
        layers = layers or range(self.layout.num_layers)
        checksums = self.sender_memory.checksums(page, layers)
        offset = self.sender_memory.offset(page, layers.start)
        to_page = page if to_page is None else to_page
        return WriteEntry(to_page, 1, layers.start, layers.stop, checksums, offset)

    async def write(
        self,
        grant_id: int,
        pages: Sequence[int],
        urgency: Urgency = Urgency.LATENCY,
        peer: OutgoingSession | None = None,
    ) -> None:
        """Send whole pages, one in each frame, and wait until all are acknowledged. Raises TransferError."""
        peer = peer or await self.peers.peer(self.address)
        changed = asyncio.Event()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(grant_id, f"grant {grant_id}", changed.set, urgency) as transfer:
            for page in pages:
                await transfer.write([self.entry(page)], self.layout.block_bytes, outcomes.append)
            while len(outcomes) < len(pages) or not transfer.is_acknowledged:
                transfer.check()
                changed.clear()
                await changed.wait()
            transfer.check()
        assert outcomes == [WriteOutcome.PLACED] * len(pages)

    def assert_written(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.receiver_memory.page(page) == self.sender_memory.page(page)

    async def fetch(self, pages: Sequence[int], peer: OutgoingSession | None = None) -> list[int]:
        """Fetch whole blocks from the receiver's `pages` into the same pages of the sender."""
        peer = peer or await self.peers.peer(self.address)
        views = [self.sender_memory.page(page) for page in pages]
        found = await peer.fetch([key(page) for page in pages], views, range(self.layout.num_layers))
        for index, checksums in found.items():
            assert checksums == self.sender_memory.checksums(pages[index], range(self.layout.num_layers))
        return list(found)

    def publish(self, pages: Sequence[int]) -> None:
        """Fill pages of the receiver. From now on their blocks can be fetched."""
        for page in pages:
            view = self.receiver_memory.page(page)
            view[:] = np.random.default_rng(1000 + page).bytes(len(view))
            self.pages.blocks[key(page)] = page

    async def assert_works(self) -> None:
        """Check that a transfer succeeds, whatever happened before.

        It uses the last page, which no grant has.
        """
        granted = {page for grant in self.pages.grants.values() for page in grant.pages}
        page = max(set(range(self.receiver_memory.num_pages)) - granted - set(self.pages.blocks.values()))
        grant_id = 1_000_000 + page
        self.pages.grant(grant_id, [page])
        await self.write(grant_id, [page])
        self.assert_written([page])

    async def _accept(self, listener: socket) -> None:
        unauthenticated = UnauthenticatedPeers()
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            if self.answer_buffer_bytes is not None:
                sock.setsockopt(SOL_SOCKET, SO_SNDBUF, self.answer_buffer_bytes)
            tls = self.tls if sock.family == AF_INET else None
            stream = Stream(sock if tls is None else tls.accept(sock))
            self.tasks.create_task(self._serve(stream, unauthenticated))

    async def _serve(self, stream: Stream, unauthenticated: UnauthenticatedPeers) -> None:
        self.num_served += 1
        try:
            await self.sessions.serve(stream, unauthenticated)
        finally:
            self.num_served -= 1

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        for listener in self._listeners:
            listener.close()
        self.sender_memory.close()
        self.receiver_memory.close()


@contextlib.asynccontextmanager
async def fabric(
    folder: Path,
    layout: KVLayout = SMALL,
    num_pages: int = 16,
    *,
    tls: Tls | None = None,
    cards: tuple[Cards, Cards] | None = None,
    **changed: object,
) -> AsyncIterator[Fabric]:
    """Make a context with a fabric and `settings(**changed)`.

    At its end both messengers stop, and hold nothing.
    """
    nodes: list[Fabric] = []
    ready, leave = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            both_cards = cards or (Cards([]), Cards([]))
            node = Fabric(tasks, folder, layout, num_pages, settings(**changed), tls, both_cards)
            await both_cards[0].register(node.sender_memory.view)
            await both_cards[1].register(node.receiver_memory.view)
            nodes.append(node)
            ready.set()
            await leave.wait()
            raise _Over

    living = asyncio.create_task(live())
    living.add_done_callback(lambda _: ready.set())
    try:
        await ready.wait()
        yield nodes[0]
    finally:
        leave.set()
        with contextlib.suppress(_Over):
            await _unwrapped(living)
        for node in nodes:
            node.close()
    nodes[0].pages.check_idle()


class _Over(Exception):
    """An error that ends a task group on purpose."""


async def _unwrapped(task: "asyncio.Task[None]") -> None:
    """Raise the error of a task of the group, without the group."""
    try:
        await task
    except BaseExceptionGroup as group:
        raise next((e for e in group.exceptions if not isinstance(e, _Over)), group.exceptions[0]) from None


def key(page: int) -> bytes:
    return page.to_bytes(16, "little")


def identity_with(identity: Identity, **changed: object) -> Identity:
    fields = {name: getattr(identity, name) for name in identity.__struct_fields__}
    return Identity(**{**fields, **changed})


def settings(**changed: object) -> MessengerConfig:
    """Return settings for TCP with short deadlines, with `changed` values."""
    return MessengerConfig(
        **{"transport": "tcp", "streams": 1, "connect_timeout_s": 10.0, "ack_timeout_s": 5.0, **changed}
    )
