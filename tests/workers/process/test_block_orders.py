"""Orders about blocks: every stage or rank hears of them, and what comes of none leaves nothing reserved."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvstore.protocol.answers import Reservation, ReservedBlock
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.block_orders import BlockOrder, DropCopies, Pin, Replicate, Unpin
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress, PoolShard
from tests.kvstore.nodes import DEADLINE_S
from workers.errors import SessionLostError
from workers.process.block_orders import BlockOrders

KEYS = [bytes([number]) * 16 for number in range(4)]
LAYOUT = KVLayout(4, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
SHARDS = (PoolShard(MessengerAddress("holder", 1, "elsewhere", "", ()), LAYOUT),)
REPLICATE = Replicate(KEYS, SHARDS, timeout_s=DEADLINE_S)


class FakePool:
    """Has `num_sealed` of the blocks of a reservation; notes what it is told. `fails`: instead."""

    def __init__(self, num_sealed: int = 0) -> None:
        self.closed = asyncio.Event()
        self.told: list[tuple[object, ...]] = []
        self.held: set[int] = set()
        """reservations"""
        self.fails: dict[str, Exception] = {}
        self.is_slow = False
        """nothing that is fetched ever comes"""
        self._num_sealed = num_sealed

    def _note(self, what: str, *details: object) -> None:
        if what in self.fails:
            raise self.fails[what]
        self.told.append((what, *details))

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        self._note("pin", keys, ttl_s)
        return len(keys)

    async def unpin(self, keys: Sequence[bytes]) -> None:
        self._note("unpin", keys)

    async def drop_idle(self, keys: Sequence[bytes]) -> None:
        self._note("drop_idle", keys)

    async def reserve(self, keys: Sequence[bytes], num_private: int, tenant: str = "") -> Reservation:
        assert num_private == 0
        self._note("reserve", keys)
        self.held.add(7)
        sealed = [index < self._num_sealed for index in range(len(keys))]
        return Reservation(
            0, 7, [ReservedBlock(page, 1, is_there, None) for page, is_there in enumerate(sealed)]
        )

    async def fetch_ahead(
        self, reservation_id: int, sources: Sequence[PoolShard], blocks: Sequence[int]
    ) -> None:
        assert reservation_id in self.held
        self._note("fetch_ahead", sources, blocks)
        if self.is_slow:
            await asyncio.Event().wait()

    async def release(self, reservation_id: int) -> None:
        self.held.remove(reservation_id)


class FakeBehind:
    """The stage behind, or the other ranks."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.is_gone = False

    async def send(self, message: msgspec.Struct) -> None:
        if self.is_gone:
            raise SessionLostError("stage 1 is gone")
        self.sent.append(message)


async def carried_out(pool: FakePool, *orders: BlockOrder, behind: FakeBehind | None = None) -> None:
    """Returns when nothing of them is left to do; raises what ends the session."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        of_session = BlockOrders(pool, behind, group)  # type: ignore[arg-type]
        for order in orders:
            of_session.obey(order)
    assert not pool.held


async def test_orders_are_carried_out_here_and_passed_on_as_they_are() -> None:
    orders = [Pin(KEYS[:2], 30.0), Unpin(KEYS[2:]), DropCopies(KEYS[:1]), REPLICATE]
    pool, behind = FakePool(), FakeBehind()
    await carried_out(pool, *orders, behind=behind)
    assert behind.sent == orders
    assert ("pin", KEYS[:2], 30.0) in pool.told
    assert ("unpin", KEYS[2:]) in pool.told
    assert ("drop_idle", KEYS[:1]) in pool.told


@pytest.mark.parametrize("num_sealed", range(len(KEYS) + 1))
async def test_copy_is_of_the_blocks_that_this_pool_lacks(num_sealed: int) -> None:
    """A stage or rank may lack others than the rest of its group."""
    pool = FakePool(num_sealed)
    await carried_out(pool, REPLICATE)
    lacking = list(range(num_sealed, len(KEYS)))
    assert pool.told[0] == ("reserve", KEYS)
    assert pool.told[1:] == ([("fetch_ahead", SHARDS, lacking)] if lacking else [])


async def test_copy_that_does_not_come_in_time_gives_its_pages_back() -> None:
    pool, behind = FakePool(), FakeBehind()
    pool.is_slow = True
    await carried_out(pool, msgspec.structs.replace(REPLICATE, timeout_s=0.01), behind=behind)
    assert pool.told[-1][0] == "fetch_ahead"


def pin_fails(pool: FakePool) -> None:
    pool.fails["pin"] = PoolError("a disk fails")


def full(pool: FakePool) -> None:
    pool.fails["reserve"] = PoolFullError("4 pages are needed, 0 are free")


def no_source(pool: FakePool) -> None:
    pool.fails["fetch_ahead"] = PoolError("reservation 7 has been granted")


@pytest.mark.parametrize(
    ("breaks", "order", "warns"),
    [(pin_fails, Pin(KEYS, 1.0), True), (full, REPLICATE, False), (no_source, REPLICATE, True)],
    ids=["pin fails", "pool is full", "fetch fails"],
)
async def test_order_that_fails_here_ends_no_session(
    breaks: Callable[[FakePool], None],
    order: BlockOrder,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full pool is nothing to be warned of: there is no copy, that is all."""
    pool, behind = FakePool(), FakeBehind()
    breaks(pool)
    with caplog.at_level(logging.WARNING):
        await carried_out(pool, order, Unpin(KEYS), behind=behind)
    assert behind.sent == [order, Unpin(KEYS)]  # the others may have room
    assert pool.told[-1] == ("unpin", KEYS)
    assert bool(caplog.records) == warns


async def test_messenger_that_is_gone_is_no_news_of_an_order(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool()
    pool.closed.set()
    pool.fails["pin"] = PoolError("messenger of p gone")
    with caplog.at_level(logging.INFO):
        await carried_out(pool, Pin(KEYS, 1.0))
    assert not caplog.records


async def test_stage_behind_that_is_gone_ends_the_session_before_anything_is_done_here() -> None:
    pool, behind = FakePool(), FakeBehind()
    behind.is_gone = True
    with pytest.raises(ExceptionGroup) as caught:
        await carried_out(pool, REPLICATE, behind=behind)
    assert isinstance(caught.value.exceptions[0], SessionLostError)
    assert not pool.told
