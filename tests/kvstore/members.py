"""Members of groups: pools in this event loop that send each other their shards of the same blocks."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from socket import socket

import numpy as np

from kvstore.pool.claims import PageReservation
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.ssd.mover import Mover
from kvstore.transfer.fetches import BlockFetch
from kvstore.transfer.grants import Grants
from kvstore.transfer.reads import Reads
from kvstore.transfer.sends import GrantSend
from messenger.rdma.cards import Cards
from messenger.receiver.receiver import Sessions, UnauthenticatedPeers
from messenger.receiver.served_pool import ServedPool
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.transport.source import SourceSegment
from messenger.transport.stream import Stream
from messenger.transport.transports import Traffic, Transport
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from messenger.wire.identity import Identity, host_id
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, MessengerAddress, PoolShard
from tests.deadline import DEADLINE_S
from tests.kvstore.nodes import CLUSTER_KEY, FINGERPRINT
from tests.messenger.fabric import settings
from tests.messenger.proxy import Proxy, listen

WHOLE = KVLayout(num_layers=9, num_kv_heads=6, head_dim=8, block_size=4, dtype="bfloat16")
OWNER = 1
_NUM_PAGES = 8


def block_of(
    key: BlockKey, whole: KVLayout = WHOLE
) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    """Return the bytes of a block by layer and head, as a model would compute them."""
    shape = whole.num_layers, whole.num_kv_heads, whole.head_bytes
    data = np.random.default_rng(int.from_bytes(key, "little")).bytes(whole.block_bytes)
    return np.frombuffer(data, np.uint8).reshape(shape)


def shard_of(key: BlockKey, shard: KVLayout, whole: KVLayout = WHOLE) -> bytes:
    """Return the bytes of one member's shard of a block."""
    layers, heads = shard.layers, shard.heads
    return block_of(key, whole)[layers.start : layers.stop, heads.start : heads.stop].tobytes()


def split(whole: KVLayout, layer_cuts: Sequence[int], head_cuts: Sequence[int]) -> list[KVLayout]:
    """Return the shards of a group. Layers are cut into stages at `layer_cuts`, heads at `head_cuts`."""
    layers = [0, *layer_cuts, whole.num_layers]
    heads = [0, *head_cuts, whole.num_kv_heads]
    return [
        whole.of_layers(range(first, last)).of_heads(range(begin, end))
        for first, last in pairwise(layers)
        for begin, end in pairwise(heads)
    ]


class Member:
    """One member: a pool and its messenger. The block of a `key` is that of `block_of`."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        folder: Path,
        name: str,
        layout: KVLayout,
        transport: Transport,
        cards: Cards,
        whole: KVLayout,
        num_proxies: int,
    ) -> None:
        self.layout = layout
        self.whole = whole
        self.tasks = tasks
        self.traffic = Traffic()
        self._fd = os.memfd_create(name)
        os.truncate(self._fd, _NUM_PAGES * (layout.block_bytes + 8192) + 32768)
        self.segment = Segment.format(self._fd, FINGERPRINT, layout)
        self.source = SourceSegment.of(self._fd, self.segment.buffer)
        catalogue = self.segment.catalogue()
        on_sealed = catalogue.note if catalogue is not None else lambda pages: None
        self.pool = Pool(self.segment.page_table(), on_sealed=on_sealed)
        self.cards = cards
        unix_path = str(folder / f"{name}.sock")
        Path(unix_path).unlink(missing_ok=True)
        self._listeners = [listen(("127.0.0.1", 0)), listen(unix_path)]
        endpoint: tuple[str, int] = self._listeners[0].getsockname()
        self.proxies = [Proxy(tasks, endpoint) for _ in range(num_proxies)]
        endpoints = tuple(proxy.endpoint for proxy in self.proxies) or (endpoint,)
        self.address = MessengerAddress(name, 1, host_id(), unix_path, endpoints)
        self.shared_segment = self.segment.shared_segment(self._fd)
        copy_table = self.shared_segment.copy_table if self.shared_segment is not None else None
        self.grants = Grants(self.pool, self.segment, self.address, copy_table)
        identity = Identity(name, 1, host_id(), FINGERPRINT, layout)
        config = settings(transport=transport.value)
        self.peers = OutgoingSessions(
            tasks,
            self.source,
            self.traffic,
            identity=identity,
            key=CLUSTER_KEY,
            tls=None,
            settings=config,
            cards=cards,
        )
        mover = Mover(
            self.pool,
            self.segment,
            None,
            tasks,
            space=asyncio.Event(),
            high_watermark=0,
            max_demotions=0,
            promotion_timeout_s=DEADLINE_S,
        )
        reads = Reads(self.pool, mover, self.segment, asyncio.get_running_loop().time)
        door = ServedPool(
            identity,
            CLUSTER_KEY,
            self.grants,
            reads,
            self.source,
            self.traffic,
            config,
            cards,
            self.shared_segment,
        )
        self._sessions = Sessions(door)
        for listener in self._listeners:
            tasks.create_task(self._accept(listener))

    def reserve(self, keys: Sequence[BlockKey]) -> PageReservation:
        return self.pool.reserve(OWNER, keys, 0)

    def write(self, reservation: PageReservation, layers: range) -> None:
        """Write these layers of this member's shard of all reserved blocks, as if they were computed."""
        for block in reservation.blocks:
            assert block.key is not None
            view = self.segment.layers_view(block.page, layers)
            begin, end = layers.start * self.layout.layer_bytes, layers.stop * self.layout.layer_bytes
            view[:] = shard_of(block.key, self.layout, self.whole)[begin:end]
            self.pool.record_arrival(block, layers, layer_checksums(view, self.layout.layer_bytes))

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Store and seal this member's shards of blocks."""
        reservation = self.reserve(keys)
        self.write(reservation, range(self.layout.num_layers))
        self.pool.release(reservation.reservation_id)

    def send(self, reservation: PageReservation, grant: Grant) -> tuple[GrantSend, "asyncio.Task[None]"]:
        send = GrantSend(self.pool, self.segment, self.peers, reservation, grant, "request 1")
        return send, self.tasks.create_task(send.run())

    async def fetch(self, keys: Sequence[BlockKey], sources: Sequence[PoolShard]) -> list[tuple[int, int]]:
        """Fetch blocks, and return the reports of arrived layers."""
        reservation, heard = self.reserve(keys), list[tuple[int, int]]()
        fetch = BlockFetch(
            self.pool,
            self.segment,
            self.peers,
            reservation,
            range(len(keys)),
            lambda *layers: heard.append(layers),
        )
        await fetch.run(sources, self.tasks)
        self.pool.release(reservation.reservation_id)
        return heard

    def damage(self, key: BlockKey, layer: int, offset: int) -> None:
        """Change a byte of a stored layer of a block."""
        page = self.pool.find(key)
        assert page is not None
        self.segment.layer_view(page, layer)[offset] ^= 1

    def assert_holds(self, keys: Sequence[BlockKey]) -> None:
        """Check that blocks are sealed, with the right bytes and matching checksums."""
        for key in keys:
            page = self.pool.find(key)
            assert page is not None
            layers = range(self.layout.num_layers)
            assert self.segment.page_view(page) == shard_of(key, self.layout, self.whole)
            checksums = self.pool.table.checksums(page, layers)
            assert len(checksums) == CHECKSUM_BYTES * len(layers)
            assert self.segment.is_intact(page, layers, checksums)

    async def assert_idle(self) -> None:
        """Check that no page is in use.

        Waits for peers that have yet to say that they have read their pages.
        """
        async with asyncio.timeout(DEADLINE_S):
            while self.pool.num_used_pages:
                await asyncio.sleep(0.001)
        assert self.pool.check_integrity() is None

    async def _accept(self, listener: socket) -> None:
        unauthenticated = UnauthenticatedPeers()
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            self.tasks.create_task(self._sessions.serve(Stream(sock), unauthenticated))

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        for listener in self._listeners:
            listener.close()
        os.close(self.source.read_only_fd)
        os.close(self._fd)


@contextlib.asynccontextmanager
async def members(
    folder: Path,
    layouts: dict[str, Sequence[KVLayout]],
    transport: Transport,
    cards: Sequence[Cards] = (),
    whole: KVLayout = WHOLE,
    num_proxies: int = 0,
) -> AsyncIterator[list[list[Member]]]:
    """Make a context with groups of members. At its end no page may be in use.

    `layouts` has the shards of each group; `cards` has the RDMA cards of each member in turn.
    """
    groups: list[list[Member]] = []
    left, ready, leave = iter(cards), asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, shards in layouts.items():
                groups.append([])
                for number, layout in enumerate(shards):
                    its_cards = next(left, Cards([]))
                    member = Member(
                        tasks, folder, f"{name}-{number}", layout, transport, its_cards, whole, num_proxies
                    )
                    groups[-1].append(member)
                    await its_cards.register(member.segment.buffer)
            ready.set()
            await leave.wait()
            raise _Over

    living = asyncio.create_task(live())
    living.add_done_callback(lambda _: ready.set())
    everybody: list[Member] = []
    try:
        await ready.wait()
        yield groups
        everybody = [member for group in groups for member in group]
        for member in everybody:
            await member.assert_idle()
    finally:
        leave.set()
        with contextlib.suppress(_Over):
            try:
                await living
            except BaseExceptionGroup as group:
                raise next((e for e in group.exceptions if not isinstance(e, _Over)), _Over()) from None
        for member in [member for group in groups for member in group]:
            member.close()


class _Over(Exception):
    """An error that ends a task group on purpose."""
