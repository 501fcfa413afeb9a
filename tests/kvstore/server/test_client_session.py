"""Calls that users may send to a messenger: whatever they are, the user is told, and no other suffers."""

from collections.abc import Callable

import msgspec
import pytest

from kvstore.protocol.answers import (
    CallFailed,
    Connected,
    Count,
    Done,
    ErrorKind,
    Leased,
    Listing,
    Reservation,
    Verified,
)
from kvstore.protocol.calls import (
    SPOKEN,
    Attach,
    AwaitArrived,
    AwaitSent,
    Commit,
    Connect,
    DescribeTokens,
    DropIdle,
    EndLease,
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
    UnpinBlocks,
    VerifyBlocks,
)
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant, GrantedPage, MessengerAddress
from tests.kvstore.nodes import FINGERPRINT, LAYOUT, prompt_keys
from tests.kvstore.server.sessions import ALL_LAYERS, BAD_KEYS, KEYS, NUM_PAGES, Join


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


@pytest.mark.parametrize(("offer", "version"), [((1, 1), 1), (SPOKEN, 2), ((2, 3), 2)])
def test_the_newest_common_version_is_spoken(join: Join, offer: tuple[int, int], version: int) -> None:
    answer = join(versions=offer).first_answer
    assert isinstance(answer, Connected)
    assert answer.version == version


def test_a_client_two_versions_away_is_told_what_to_upgrade(join: Join) -> None:
    answer = join(versions=(3, 4)).first_answer
    assert isinstance(answer, CallFailed)
    assert "upgrade the pool to a release that speaks 3 first" in answer.message


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
