"""The ends of connections, and of leases: nothing stays behind."""

from kvstore.protocol.answers import (
    Leased,
    Located,
    Reservation,
)
from kvstore.protocol.calls import (
    AwaitArrived,
    AwaitSpace,
    EndLease,
    LeaseBlocks,
    Lookup,
    OpenGrant,
    Release,
    ReservePages,
    VerifyBlocks,
)
from tests.kvstore.server.sessions import KEYS, Join


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
