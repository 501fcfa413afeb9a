"""What users may send to a messenger: whatever it is, he is told, and nobody else suffers.

The first part is a real messenger and users who write their messages by hand; the second runs sessions in
this process, on disks that do what the test says.
"""

import array
import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT
from kvstore.protocol.answers import (
    CallFailed,
    Count,
    Detached,
    Done,
    ErrorKind,
    Fetched,
    FromPool,
    Leased,
    Listing,
    Located,
    Reservation,
    Stats,
    Verified,
)
from kvstore.protocol.calls import (
    MAX_MESSAGE_BYTES,
    Attach,
    AwaitArrived,
    AwaitSent,
    AwaitSpace,
    Commit,
    Connect,
    DescribeTokens,
    DropIdle,
    EndLease,
    FetchBlocks,
    GetStats,
    LeaseBlocks,
    ListBlocks,
    Lookup,
    OpenGrant,
    PinBlocks,
    Prefetch,
    Release,
    RemoveBlocks,
    ReservePages,
    SealBlocks,
    StartSend,
    StopFetch,
    ToPool,
    UnpinBlocks,
    VerifyBlocks,
)
from kvstore.server import listing
from kvstore.server import store as store_module
from kvstore.server.client_session import ClientSession, User
from kvstore.server.listing import pool_stats, verify_block
from messenger.wire.checksums import layer_checksums
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import KVCleared
from mooncake.messages.pools import Grant, GrantedPage, MessengerAddress, PoolShard, PoolStats, Tier
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT, Node, prompt_keys
from tests.kvstore.tiers import ADDRESS, FakeSlab, Running, block_of, checksums_of, key_of, running, until
from tests.kvstore.tiers import LAYOUT as TIERS_LAYOUT

NUM_PAGES = 16
KEYS = prompt_keys(8)
BAD_KEYS = [[b""], [bytes(15)], [bytes(17)], [KEYS[0], bytes(1000)]]
ALL_LAYERS = range(LAYOUT.num_layers)


class HandMadeUser:
    """Sends what it likes and reads what comes. Each call is named by the next number."""

    def __init__(self, node: Node, serial: int = 1) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_S)
        while True:
            try:
                self.sock.connect(node.socket_path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert node.process is not None
                assert node.process.poll() is None
        self.first_answer = self.call(Connect(0, FINGERPRINT, LAYOUT, serial, may_format=True))

    def tell(self, message: msgspec.Struct | bytes) -> None:
        self.sock.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def hear(self) -> FromPool | None:
        """The next message, None when the connection has ended."""
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            return None
        for _, _, descriptor in ancillary:
            os.close(array.array("i", descriptor)[0])
        return msgspec.msgpack.decode(data, type=FromPool) if data else None

    def call(self, message: msgspec.Struct) -> FromPool:
        """The answer; nothing else may come before it."""
        self.tell(message)
        answer = self.hear()
        assert answer is not None
        assert isinstance(answer, Detached) or answer.call_id == message.call_id  # type: ignore[attr-defined]
        return answer

    def stats(self) -> PoolStats:
        answer = self.call(GetStats(1, check_integrity=True))
        assert isinstance(answer, Stats)
        assert answer.stats.integrity is None
        return answer.stats

    def until(self, condition: Callable[[PoolStats], bool]) -> PoolStats:
        """The first statistics that fulfil `condition`; as many as it takes are asked for."""
        while not condition(stats := self.stats()):
            assert self.sock.gettimeout() == DEADLINE_S
        return stats

    def put(self, *keys: BlockKey) -> Reservation:
        """Seals blocks (of any bytes) and keeps their reservation."""
        reservation = self.call(ReservePages(1, list(keys), 0))
        assert isinstance(reservation, Reservation)
        pages = [block.page for block in reservation.blocks if not block.sealed]
        checksums = bytes(8 * LAYOUT.num_layers * len(pages))
        self.tell(Commit(reservation.reservation_id, 0, LAYOUT.num_layers, pages, checksums))
        return reservation

    def is_ended(self) -> Detached:
        """The reason; then the connection is closed."""
        reason = self.hear()
        assert isinstance(reason, Detached)
        assert self.hear() is None
        return reason

    def close(self) -> None:
        self.sock.close()


Join = Callable[..., HandMadeUser]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    num_bytes = 3 * ALIGNMENT + NUM_PAGES * (LAYOUT.block_bytes + record_bytes(LAYOUT.num_layers))
    node = Node(folder, "node", num_bytes, "auto")
    with contextlib.closing(node):
        node.start()
        yield node


@pytest.fixture
def join(node: Node, capfd: pytest.CaptureFixture[str]) -> Iterator[Join]:
    """Users of a messenger that must outlive the test, with nothing in use and no traceback in its log."""
    users = []

    def join(serial: int = 1) -> HandMadeUser:
        users.append(HandMadeUser(node, serial))
        return users[-1]

    yield join
    for user in users:
        user.close()
    witness = HandMadeUser(node, serial=99)
    with contextlib.closing(witness):
        witness.call(UnpinBlocks(1, KEYS))
        witness.until(lambda s: s.num_used == s.num_leases == s.num_reservations == s.num_pins == 0)
        witness.call(RemoveBlocks(1, None))
        assert witness.stats().num_free == NUM_PAGES
    assert node.process is not None
    assert node.process.poll() is None
    assert "Traceback" not in capfd.readouterr().err


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", BAD_KEYS)
@pytest.mark.parametrize(
    "call",
    [
        lambda keys: ReservePages(7, keys, 0),
        lambda keys: Lookup(7, keys),
        lambda keys: LeaseBlocks(7, keys, 5.0),
        lambda keys: PinBlocks(7, keys, 5.0, False),
        lambda keys: UnpinBlocks(7, keys),
        lambda keys: RemoveBlocks(7, keys),
        lambda keys: VerifyBlocks(7, keys),
    ],
    ids=["reserve", "lookup", "lease", "pin", "unpin", "remove", "verify"],
)
def test_call_with_what_is_no_key_fails_and_does_nothing(
    join: Join, call: Callable[[list[BlockKey]], msgspec.Struct], keys: list[BlockKey]
) -> None:
    user = join()
    user.put(KEYS[0])
    answer = user.call(call(keys))
    assert isinstance(answer, CallFailed)
    assert answer.message == f"a key of {len(keys[-1])} bytes; keys have 16"
    stats = user.stats()
    assert (stats.num_sealed, stats.num_leases, stats.num_reservations, stats.num_pins) == (1, 0, 1, 0)


@pytest.mark.parametrize(
    ("notice", "reason"),
    [
        (Prefetch([bytes(15)]), "a key of 15 bytes"),
        (DropIdle([bytes(15)]), "a key of 15 bytes"),
        (b"\xc1", "cannot be read"),
        (b"GET / HTTP/1.1\r\n", "cannot be read"),
        (b"\x91" * 2000, "cannot be read"),
        (msgspec.msgpack.encode(["Lookup", 1, [b"x"]]), "cannot be read"),
        (msgspec.msgpack.encode({"type": "Lookup", "call_id": 1, "keys": ["text"]}), "cannot be read"),
        (msgspec.msgpack.encode({"type": "Unknown", "call_id": 1}), "cannot be read"),
    ],
)
def test_what_is_no_message_ends_the_session_with_a_reason(
    join: Join, notice: msgspec.Struct | bytes, reason: str
) -> None:
    user = join()
    user.put(KEYS[0])
    user.tell(notice)
    assert reason in user.is_ended().reason


@pytest.mark.parametrize("ttl_s", [-1.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e300, 31 * 86400.0])
def test_time_to_live_that_is_none_is_refused(join: Join, ttl_s: float) -> None:
    user = join()
    user.put(KEYS[0])
    for call in (LeaseBlocks(7, KEYS[:1], ttl_s), PinBlocks(7, KEYS[:1], ttl_s, False)):
        answer = user.call(call)
        assert isinstance(answer, CallFailed)
        assert "it must be positive and at most" in answer.message
    stats = user.stats()
    assert (stats.num_leases, stats.num_pins) == (0, 0)


@pytest.mark.parametrize("reservation_id", [0, -1, 77, (1 << 64) - 1])
def test_unknown_reservation_is_an_error_or_ignored(join: Join, reservation_id: int) -> None:
    user = join()
    grant = Grant(1, MessengerAddress("other", 1, "host", "/nowhere", (("127.0.0.1", 1),)), [])
    for call in (
        OpenGrant(7, reservation_id),
        AwaitSent(7, reservation_id),
        AwaitArrived(7, reservation_id),
        StartSend(7, reservation_id, grant, "a request"),
    ):
        answer = user.call(call)
        assert isinstance(answer, CallFailed)
        assert answer.kind is ErrorKind.POOL
    assert user.call(Release(7, reservation_id)) == Done(7)
    user.tell(Commit(reservation_id, 0, 1, [0], bytes(8)))
    user.tell(DescribeTokens(reservation_id, 0, bytes(64)))
    user.tell(EndLease(reservation_id))
    user.stats()


def test_what_is_somebody_elses_cannot_be_ended_written_or_granted(join: Join) -> None:
    owner, other = join(1), join(2)
    reservation = owner.call(ReservePages(1, KEYS[:2], 0))
    assert isinstance(reservation, Reservation)
    sealed = owner.put(KEYS[3])
    lease = owner.call(LeaseBlocks(1, [KEYS[3]], 60.0))
    assert isinstance(lease, Leased)
    other.tell(EndLease(lease.lease_id))
    assert other.call(Release(7, reservation.reservation_id)) == Done(7)
    assert isinstance(other.call(OpenGrant(7, reservation.reservation_id)), CallFailed)
    page = reservation.blocks[0].page
    other.tell(Commit(reservation.reservation_id, 0, len(ALL_LAYERS), [page], bytes(8 * len(ALL_LAYERS))))
    other.tell(DescribeTokens(reservation.reservation_id, 0, bytes(4 * LAYOUT.block_size)))
    stats = other.stats()
    assert (stats.num_leases, stats.num_reservations, stats.num_reserved, stats.num_sealed) == (1, 2, 2, 1)
    other.close()
    owner.until(lambda stats: stats.num_leases == 1)
    assert owner.call(Release(7, sealed.reservation_id)) == Done(7)
    assert owner.stats().num_used == 3, "the lease is still there"


def test_key_that_is_named_twice_counts_once(join: Join) -> None:
    user = join()
    reservation = user.call(ReservePages(1, [KEYS[0], KEYS[0]], 0))
    assert isinstance(reservation, Reservation)
    pages = [block.page for block in reservation.blocks]
    checksums = bytes(8 * len(ALL_LAYERS) * 2)
    user.tell(Commit(reservation.reservation_id, 0, len(ALL_LAYERS), pages, checksums))
    user.call(Release(1, reservation.reservation_id))
    stats = user.stats()
    assert (stats.num_sealed, stats.num_used, stats.num_free) == (1, 0, NUM_PAGES - 1)
    twice = [KEYS[0], KEYS[0]]
    lease = user.call(LeaseBlocks(1, twice, 60.0))
    assert isinstance(lease, Leased)
    assert lease.pages[0] == lease.pages[1] is not None
    user.tell(EndLease(lease.lease_id))
    user.tell(EndLease(lease.lease_id))
    assert user.call(PinBlocks(1, twice, 60.0, True)) == Count(1, 1)
    assert user.stats().num_used == 1
    assert user.call(UnpinBlocks(1, twice)) == Count(1, 1)
    found = user.call(ReservePages(1, twice, 0))
    assert isinstance(found, Reservation)
    assert [block.sealed for block in found.blocks] == [True, True]
    user.call(Release(1, found.reservation_id))
    assert user.stats().num_used == 0
    answer = user.call(VerifyBlocks(1, twice))
    assert isinstance(answer, Verified)
    assert (answer.num_intact, answer.damaged) == (0, [KEYS[0]]), "its checksums are made up"
    user.put(KEYS[1])
    assert user.call(RemoveBlocks(1, [KEYS[1], KEYS[1]])) == Count(1, 1)


def test_commit_of_a_page_twice_in_one_message_ends_the_session(join: Join) -> None:
    user = join()
    reservation = user.call(ReservePages(1, KEYS[:1], 0))
    assert isinstance(reservation, Reservation)
    page = reservation.blocks[0].page
    user.tell(Commit(reservation.reservation_id, 0, 1, [page, page], bytes(16)))
    assert "were there already" in user.is_ended().reason


@pytest.mark.parametrize(
    ("layer_begin", "layer_end"),
    [(0, 0), (1, 0), (-1, 1), (0, 5), (0, (1 << 64) - 1), (-(1 << 63), (1 << 64) - 1), (1 << 62, 1 << 63)],
)
def test_commit_of_layers_that_are_none_ends_the_session(
    join: Join, layer_begin: int, layer_end: int
) -> None:
    user = join()
    reservation = user.call(ReservePages(1, KEYS[:1], 0))
    assert isinstance(reservation, Reservation)
    user.tell(Commit(reservation.reservation_id, layer_begin, layer_end, [reservation.blocks[0].page], b""))
    assert "a commit names layers" in user.is_ended().reason


def test_too_many_hard_pins_are_refused_and_pins_outlive_their_connection(join: Join) -> None:
    user = join()
    reservation = user.put(*prompt_keys(NUM_PAGES // 2 + 1))
    user.call(Release(1, reservation.reservation_id))
    answer = user.call(PinBlocks(1, prompt_keys(NUM_PAGES // 2 + 1), 60.0, True))
    assert isinstance(answer, CallFailed)
    assert "9 of 16 pages would be pinned hard, at most half may be" in answer.message
    assert user.stats().num_pins == 0
    assert user.call(PinBlocks(1, KEYS, 60.0, True)) == Count(1, NUM_PAGES // 2)
    user.close()
    other = join(2)
    assert other.stats().num_pins == NUM_PAGES // 2
    answer = other.call(ReservePages(1, [], NUM_PAGES // 2 + 1))
    assert isinstance(answer, CallFailed)
    assert answer.kind is ErrorKind.POOL_FULL


@pytest.mark.parametrize(
    ("first_block", "num_bytes", "reason"),
    [
        (0, 4 * LAYOUT.block_size + 4, "are no token ids of blocks of 16"),
        (0, 5, "are no token ids of blocks of 16"),
        (2, 4 * LAYOUT.block_size, "token ids for block 2 of 2"),
        (1, 8 * LAYOUT.block_size, "token ids for block 2 of 2"),
        (-1, 4 * LAYOUT.block_size, "token ids for block -1 of 2"),
        ((1 << 64) - 1, 4 * LAYOUT.block_size, "token ids for block 18446744073709551615 of 2"),
    ],
)
def test_tokens_of_blocks_that_are_none_end_the_session(
    join: Join, first_block: int, num_bytes: int, reason: str
) -> None:
    user = join()
    reservation = user.call(ReservePages(1, KEYS[:2], 0))
    assert isinstance(reservation, Reservation)
    user.tell(DescribeTokens(reservation.reservation_id, 0, bytes(8 * LAYOUT.block_size)))
    user.tell(DescribeTokens(reservation.reservation_id, 5, b""))
    user.stats()
    user.tell(DescribeTokens(reservation.reservation_id, first_block, bytes(num_bytes)))
    assert reason in user.is_ended().reason


@pytest.mark.parametrize("num_private", [-1, -(1 << 63), NUM_PAGES + 1, (1 << 64) - 1])
def test_number_of_pages_that_is_none_is_refused(join: Join, num_private: int) -> None:
    user = join()
    answer = user.call(ReservePages(1, KEYS[:1], num_private))
    assert isinstance(answer, CallFailed)
    assert answer.kind is ErrorKind.POOL
    assert user.stats().num_used == 0


@pytest.mark.parametrize(
    ("cursor", "max_blocks"), [(-1, 5), (-1000, 5), (-(1 << 63), 5), (0, 0), (0, -1), (0, -(1 << 63))]
)
def test_part_of_a_list_that_is_none_is_refused(join: Join, cursor: int, max_blocks: int) -> None:
    user = join()
    user.put(*KEYS[:4])
    answer = user.call(ListBlocks(1, cursor, max_blocks))
    assert isinstance(answer, CallFailed)
    assert answer.kind is ErrorKind.POOL


def test_list_may_be_read_in_parts_of_any_size(join: Join) -> None:
    user = join()
    user.put(*KEYS[:5])
    for max_blocks in (1, 2, 5, 1000, (1 << 64) - 1):
        cursor, listed = 0, []
        while cursor is not None:
            answer = user.call(ListBlocks(1, cursor, max_blocks))
            assert isinstance(answer, Listing)
            assert len(answer.blocks) <= max_blocks
            listed += [block.key for block in answer.blocks]
            cursor = answer.next_cursor
        assert sorted(listed) == sorted(KEYS[:5])
    assert user.call(ListBlocks(1, (1 << 64) - 1, 5)) == Listing(1, [], None)


def test_who_is_connected_cannot_introduce_himself_again(join: Join) -> None:
    user = join()
    for first in (Connect(7, FINGERPRINT, LAYOUT, 5), Attach(7, "node", 1, FINGERPRINT, LAYOUT, 0)):
        answer = user.call(first)
        assert isinstance(answer, CallFailed)
        assert "attached already" in answer.message


def granted_for(index: int) -> Grant:
    """For a block of this index in the request."""
    address = MessengerAddress("other", 1, "host", "/nowhere", (("127.0.0.1", 1),))
    return Grant(1, address, [GrantedPage(index, 0, 0)])


def test_grant_for_a_block_that_is_none_is_refused(join: Join) -> None:
    user = join()
    reservation = user.put(KEYS[0])
    answer = user.call(StartSend(7, reservation.reservation_id, granted_for(1), "a request"))
    assert isinstance(answer, CallFailed)


@pytest.mark.parametrize("index", [-1, (1 << 64) - 1])
def test_grant_for_what_cannot_be_an_index_ends_the_connection(join: Join, index: int) -> None:
    user, other = join(1), join(2)
    reservation = user.put(KEYS[0])
    user.tell(StartSend(7, reservation.reservation_id, granted_for(index), "a request"))
    assert "$.grant.pages[0][0]" in user.is_ended().reason
    other.until(lambda stats: stats.num_reservations == 0)


# -- ends ---------------------------------------------------------------------------------------------


def test_leases_and_reservations_end_with_their_connection(join: Join) -> None:
    user, witness = join(1), join(2)
    user.put(KEYS[0])
    user.call(LeaseBlocks(1, KEYS[:1], 600.0))
    user.call(ReservePages(1, KEYS[1:3], 1))
    user.tell(AwaitSpace(1, 1 << 60))
    stats = witness.stats()
    assert (stats.num_leases, stats.num_reservations, stats.num_used) == (1, 2, 4)
    user.close()
    stats = witness.until(lambda stats: stats.num_used == 0)
    assert (stats.num_leases, stats.num_reservations, stats.num_expired_leases) == (0, 0, 0)
    assert witness.call(Lookup(1, KEYS[:2])) == Located(1, b"\x01\x00")


def test_lease_ends_by_itself(join: Join) -> None:
    user = join()
    user.call(Release(1, user.put(KEYS[0]).reservation_id))
    num_expired = user.stats().num_expired_leases
    lease = user.call(LeaseBlocks(1, KEYS[:1], 0.01))
    assert isinstance(lease, Leased)
    assert user.stats().num_leases == 1
    stats = user.until(lambda stats: stats.num_leases == 0)
    assert (stats.num_used, stats.num_expired_leases) == (0, num_expired + 1)
    user.tell(EndLease(lease.lease_id))
    user.stats()


def test_who_waits_for_something_and_goes_leaves_nothing_behind(join: Join) -> None:
    user = join()
    reservation = user.call(ReservePages(1, KEYS[:1], 0))
    assert isinstance(reservation, Reservation)
    user.call(OpenGrant(1, reservation.reservation_id))
    for call in (AwaitSpace(1, 1 << 60), AwaitArrived(2, reservation.reservation_id), VerifyBlocks(3, KEYS)):
        user.tell(call)
    user.close()


# -- sessions in this process -------------------------------------------------------------------------


class Answers:
    """What a session has said, by the number of the call."""

    def __init__(self) -> None:
        self.all: dict[int, FromPool] = {}

    def __call__(self, answer: FromPool) -> None:
        assert isinstance(answer, Detached) or answer.call_id not in self.all, "a call is answered once"
        if not isinstance(answer, Detached):
            self.all[answer.call_id] = answer

    async def to(self, call_id: int) -> FromPool:
        await until(lambda: call_id in self.all)
        return self.all[call_id]


@contextlib.asynccontextmanager
async def session(r: Running, owner: int = 5) -> AsyncIterator[tuple[ClientSession, Answers]]:
    answers = Answers()
    async with asyncio.TaskGroup() as tasks:
        session = ClientSession(User(owner, "a test", None), r.store, tasks, answers)
        try:
            yield session, answers
        finally:
            session.end()


async def on_ssd_only(r: Running, *keys: BlockKey) -> None:
    """Stores blocks and pushes them out of DRAM."""
    await r.put(*keys)
    reservation = await r.reserve([], r.pool.table.num_pages)
    r.pool.release(reservation.reservation_id)


async def test_blocks_on_ssd_are_leased_reserved_and_pinned_as_those_in_dram() -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 7)]
        await on_ssd_only(r, *keys)
        user.handle(Lookup(1, keys))
        assert await answers.to(1) == Located(1, b"\x02" * 6)
        user.handle(LeaseBlocks(2, keys[:2], 60.0))
        lease = await answers.to(2)
        assert isinstance(lease, Leased)
        for key, page in zip(keys, lease.pages, strict=False):
            assert page is not None
            assert r.store.segment.page_view(page) == block_of(key)
        user.handle(PinBlocks(3, keys[2:4], 60.0, True))
        assert await answers.to(3) == Count(3, 2)
        user.handle(ReservePages(4, keys[4:], 2))
        reservation = await answers.to(4)
        assert isinstance(reservation, Reservation)
        assert [block.sealed for block in reservation.blocks] == [True, True, False, False]
        assert r.pool.pins.remove(keys) == 2


async def test_reservation_promotes_no_block_behind_one_that_nobody_has() -> None:
    slab = FakeSlab(20)
    async with running(8, slab) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 5)]
        await on_ssd_only(r, keys[0], keys[3])
        user.handle(ReservePages(1, keys, 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        assert [block.sealed for block in reservation.blocks] == [True, False, False, False]
        assert slab.num_reads == 1


SOURCES = [PoolShard(ADDRESS, TIERS_LAYOUT)]


@contextlib.asynccontextmanager
async def fetching() -> AsyncIterator[tuple[ClientSession, Answers, Reservation, asyncio.Event]]:
    """A session that has just read a call (2) to fetch two blocks, from where nobody answers, and what is set
    when that has been tried."""
    is_connecting = asyncio.Event()

    async def peer(address: MessengerAddress) -> None:
        is_connecting.set()
        await asyncio.Event().wait()

    async with running(8) as r, session(r) as (user, answers):
        r.store.peers = SimpleNamespace(all=[], peer=peer)  # type: ignore[assignment]
        user.handle(ReservePages(1, [key_of(1), key_of(2)], 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        user.handle(FetchBlocks(2, reservation.reservation_id, SOURCES, [0, 1]))
        yield user, answers, reservation, is_connecting


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("end", [StopFetch, lambda reservation_id: Release(3, reservation_id)])
async def test_fetch_is_ended_by_what_comes_right_behind_it(
    has_begun: bool, end: Callable[[int], StopFetch | Release]
) -> None:
    async with fetching() as (user, answers, reservation, is_connecting):
        if has_begun:
            await asyncio.wait_for(is_connecting.wait(), DEADLINE_S)
        user.handle(end(reservation.reservation_id))
        pages = [block.page for block in reservation.blocks]
        assert await answers.to(2) == Fetched(2, [0, 0], pages)


async def test_what_is_used_or_pinned_stays_when_idle_blocks_are_dropped() -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        on_ssd, idle, pinned, softly_pinned, used, other = (key_of(number) for number in range(1, 7))
        await on_ssd_only(r, on_ssd)
        await r.put(idle, pinned, softly_pinned, used, other)
        r.pool.pins.add([pinned], hard=True, deadline_s=1e9)
        r.pool.pins.add([softly_pinned], hard=False, deadline_s=1e9)
        user.handle(LeaseBlocks(1, [used], 5.0))
        await answers.to(1)
        user.handle(DropIdle([on_ssd, idle, pinned, softly_pinned, used, key_of(7)]))
        keys = [on_ssd, idle, pinned, softly_pinned, used, other]
        assert r.pool.locate(keys) == [None, None, *[Tier.DRAM] * 4]
        assert r.pool.pins.remove([pinned, softly_pinned]) == 2


async def test_what_comes_right_behind_a_fetch_finds_its_pages_taken() -> None:
    async with fetching() as (user, answers, reservation, _):
        user.handle(OpenGrant(3, reservation.reservation_id))
        user.handle(FetchBlocks(4, reservation.reservation_id, SOURCES, [0]))
        for call_id, reason in ((3, "cannot be granted"), (4, "is being fetched already")):
            refused = await answers.to(call_id)
            assert isinstance(refused, CallFailed)
            assert reason in refused.message
        with pytest.raises(PoolError, match="is not the user's to write"):
            user.handle(Commit(reservation.reservation_id, 0, 1, [reservation.blocks[0].page], bytes(8)))


@pytest.mark.parametrize("keys", BAD_KEYS)
async def test_what_is_no_key_fails_also_where_there_is_ssd(keys: list[BlockKey]) -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        await on_ssd_only(r, key_of(1))
        mixed = [key_of(1), *keys]
        calls = (ReservePages(1, mixed, 0), LeaseBlocks(2, mixed, 5.0), PinBlocks(3, mixed, 5.0, True))
        for number, call in enumerate(calls, 1):
            user.handle(call)
            assert isinstance(await answers.to(number), CallFailed)
        with pytest.raises(PoolError):
            user.handle(Prefetch(mixed))
        assert r.is_settled()


@pytest.mark.parametrize(
    "call",
    [
        LeaseBlocks(1, [key_of(1)], 60.0),
        ReservePages(1, [key_of(1)], 1),
        PinBlocks(1, [key_of(1)], 60.0, True),
        VerifyBlocks(1, [key_of(1)]),
    ],
    ids=lambda call: type(call).__name__,
)
async def test_who_goes_while_a_disk_works_for_him_leaves_nothing_behind(call: ToPool) -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await on_ssd_only(r, key_of(1))
        slab.hang()
        async with session(r) as (user, answers):
            user.handle(call)
            await until(lambda: slab.num_reads)
        assert answers.all == {}
        slab.go_on()
        await until(r.is_settled)
        assert (len(r.pool.leases), len(r.pool.pins)) == (0, 0)
        assert await r.get(key_of(1)) == block_of(key_of(1))


async def test_verifying_reports_and_drops_the_damaged_copy_of_each_tier() -> None:
    slab = FakeSlab(20)
    async with running(8, slab) as r, session(r) as (user, answers):
        intact, bad_on_ssd, bad_in_dram, absent = (key_of(number) for number in range(1, 5))
        await on_ssd_only(r, intact, bad_on_ssd)
        assert await r.get(intact) == block_of(intact)
        assert await r.get(bad_on_ssd) == block_of(bad_on_ssd)
        await r.put(bad_in_dram)
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[bad_on_ssd])
        page = r.pool.find(bad_in_dram)
        assert page is not None
        r.store.segment.page_view(page)[0] ^= 1
        user.handle(VerifyBlocks(1, [intact, bad_on_ssd, bad_in_dram, absent, bad_in_dram]))
        answer = await answers.to(1)
        assert isinstance(answer, Verified)
        assert (answer.num_intact, answer.damaged) == (1, [bad_on_ssd, bad_in_dram])
        assert await r.get(bad_on_ssd) == block_of(bad_on_ssd), "of that one DRAM has another copy"
        assert not r.ssd.holds(bad_on_ssd)
        assert not r.has(bad_in_dram)
        stats = pool_stats(r.store, check_integrity=True)
        assert [tier.num_checksum_failures for tier in stats.tiers.values()] == [1, 1]


async def test_block_that_is_being_verified_keeps_its_page_even_when_nobody_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slowly(layers: memoryview, layer_bytes: int) -> bytes:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return layer_checksums(layers, layer_bytes)

    monkeypatch.setattr(listing, "layer_checksums", slowly)
    async with running(1) as r:
        await r.put(key_of(1))
        async with session(r) as (user, answers):
            user.handle(VerifyBlocks(1, [key_of(1)]))
            await until(has_begun.is_set)
        assert answers.all == {}
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 1)
        may_end.set()
        await until(r.is_settled)
        assert r.read(key_of(1)) == block_of(key_of(1))


async def test_block_that_comes_to_a_page_after_a_damaged_one_was_found_there_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(1) as r:
        await r.put(key_of(1))
        page = r.pool.find(key_of(1))
        assert page is not None
        r.store.segment.page_view(page)[0] ^= 1
        unhold = r.pool.unhold

        def unhold_and_replace(page: int, *, used: bool = True) -> None:
            unhold(page, used=used)
            monkeypatch.undo()
            reservation = r.pool.reserve(1, [key_of(2)], 0)
            r.pool.arrived(reservation, reservation.blocks[0], range(3), checksums_of(key_of(2)))
            r.pool.release(reservation.reservation_id)

        monkeypatch.setattr(r.pool, "unhold", unhold_and_replace)
        assert await verify_block(r.store, key_of(1)) is False
        assert r.pool.find(key_of(2)) == page


async def test_page_that_a_damaged_block_was_to_come_to_is_the_requests_own() -> None:
    """Nobody else might ever free a page, so the request would wait for ever."""
    slab = FakeSlab(20)
    async with running(2, slab) as r, session(r) as (user, answers):
        await on_ssd_only(r, key_of(1))
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[key_of(1)])
        other = await r.reserve([], 1)
        user.handle(ReservePages(1, [key_of(1)], 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        assert not reservation.blocks[0].sealed
        r.pool.release(other.reservation_id)


async def test_users_who_wait_for_a_full_pool_do_not_keep_each_other_busy() -> None:
    """Each tries again when room has changed; that he could not be served is no such change."""
    slab = FakeSlab(40)
    async with running(8, slab) as r, contextlib.AsyncExitStack() as stack:
        users = [await stack.enter_async_context(session(r, owner)) for owner in (5, 6, 7)]
        await on_ssd_only(r, *(key_of(number) for number in range(1, 7)))
        leased = await r.reserve([], 6)
        tries = 0

        async def wait(number: int) -> None:
            nonlocal tries
            user, answers = users[number]
            keys = [key_of(2 * number + 1), key_of(2 * number + 2)]
            call_id = 1
            while True:
                tries += 1
                user.handle(ReservePages(call_id, keys, 4))
                answer = await answers.to(call_id)
                if not isinstance(answer, CallFailed):
                    break
                user.handle(AwaitSpace(call_id + 1, answer.space_epoch))
                await answers.to(call_id + 1)
                call_id += 2
            assert isinstance(answer, Reservation)
            user.handle(Release(call_id + 1, answer.reservation_id))

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await until(lambda: tries >= 3)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert (tries, slab.num_reads) == (3, 0), "nothing is read for a request that cannot be served"
        r.pool.release(leased.reservation_id)
        await asyncio.gather(*waiting)


# -- upkeep -------------------------------------------------------------------------------------------


async def test_page_whose_user_nobody_knows_is_reported_and_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(4) as r:
        await r.put(key_of(1))
        r.store.check()
        assert (r.store.problem, r.store.num_orphaned, caplog.records) == (None, 0, [])
        page = r.pool.find(key_of(1))
        assert page is not None
        r.pool.allocator.claim([page])
        for _ in range(3):
            r.store.check()
        stats = pool_stats(r.store, check_integrity=True)
        assert stats.num_orphaned == 1
        assert stats.integrity == "a page's users are not its reservations, leases, pins and holds"
        assert [record.message for record in caplog.records] == [
            f"pages are not all accounted for: {stats.integrity}"
        ]
        assert caplog.records[0].levelno == logging.ERROR
        r.pool.allocator.unclaim([page])
        r.store.check()
        assert (r.store.problem, r.store.num_orphaned) == (None, 0)
        r.pool.allocator.claim([page])
        r.store.check()
        assert len(caplog.records) == 2, "it was right in between"
        r.pool.allocator.unclaim([page])


async def test_orphaned_page_is_noticed_without_anybody_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_TICK_S", 0.001)
    async with running(4) as r:
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(r.store.tend(tasks))
            await asyncio.sleep(0)
            await r.put(key_of(1))
            page = r.pool.find(key_of(1))
            assert page is not None
            r.pool.allocator.claim([page])
            await until(lambda: r.store.num_orphaned == 1)
            tending.cancel()
        r.pool.allocator.unclaim([page])


async def test_leases_and_pins_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_TICK_S", 0.001)
    async with running(4) as r, session(r) as (user, answers):
        await r.put(key_of(1))
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(r.store.tend(tasks))
            user.handle(LeaseBlocks(1, [key_of(1)], 0.02))
            user.handle(PinBlocks(2, [key_of(1)], 0.02, True))
            assert isinstance(await answers.to(1), Leased)
            assert r.pool.num_used_pages == 1
            await until(lambda: r.pool.num_used_pages == 0)
            assert (len(r.pool.leases), len(r.pool.pins)) == (0, 0)
            tending.cancel()


async def test_problem_on_a_disk_is_reported_too() -> None:
    async with running(4, FakeSlab(8)) as r:
        assert r.ssd is not None
        r.ssd.disks[0].allocator.claim([0])
        stats = pool_stats(r.store, check_integrity=True)
        assert stats.integrity == "/disk/node.slab: a FREE page is in use"
        r.ssd.disks[0].allocator.unclaim([0])
        r.ssd.disks[0].allocator.num_users[0] = 0


async def test_everything_can_be_removed_at_once() -> None:
    async with running(4, FakeSlab(8)) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 7)]
        await on_ssd_only(r, *keys[:3])
        await r.put(*keys[3:])
        r.store.events.seal()
        user.handle(RemoveBlocks(1, None))
        assert await answers.to(1) == Count(1, 6)
        assert not any(map(r.has, keys))
        batch = r.store.events.seal()
        assert batch is not None
        assert batch.events == [KVCleared()]
        assert list(r.store.snapshot()) == [(Tier.DRAM, []), (Tier.SSD, [])]


def test_blocks_are_sealed_all_at_once_or_not_at_all(join: Join) -> None:
    user = join()
    checksums = bytes(8 * LAYOUT.num_layers)
    stored = user.put(KEYS[0])
    reservation = user.call(ReservePages(1, KEYS[:3], 0))
    assert isinstance(reservation, Reservation)
    for wrong in (b"", checksums, 3 * checksums):
        refused = user.call(SealBlocks(1, reservation.reservation_id, wrong))
        assert isinstance(refused, CallFailed)
        assert f"2 pages came with {len(wrong)} bytes of checksums" in refused.message
    user.tell(Commit(reservation.reservation_id, 0, 1, [reservation.blocks[1].page], bytes(8)))
    begun = user.call(SealBlocks(1, reservation.reservation_id, 2 * checksums))
    assert isinstance(begun, CallFailed)
    assert "is being written otherwise" in begun.message
    assert user.call(Release(1, reservation.reservation_id)) == Done(1)
    again = user.call(ReservePages(1, KEYS[:3], 0))
    assert isinstance(again, Reservation)
    assert user.call(SealBlocks(1, again.reservation_id, 2 * checksums)) == Done(1)
    unknown = user.call(SealBlocks(1, again.reservation_id, b""))
    assert isinstance(unknown, CallFailed)
    assert "unknown or was released" in unknown.message
    user.call(Release(1, stored.reservation_id))
    stats = user.stats()
    assert (stats.num_sealed, stats.num_used) == (3, 0)
