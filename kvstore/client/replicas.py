"""Copies of a block in several pools, which messengers make on a client's order.

A copy is an ordinary transfer. The target reserves a page and opens it to the source. The source finds the
block and sends its layers to this page. The target verifies every layer, and seals the block.

Owns: where copies should be, and how each is made. Does not know: how messengers move bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.client.backends import Backend, Unreachable, no_answer
from kvstore.client.connections import PoolConnection
from kvstore.protocol.answers import Count, Done, Granted, Located
from kvstore.protocol.calls import AwaitArrived, AwaitSent, Lookup, OpenGrant, RemoveBlocks, StartSend
from mooncake.errors import MooncakeError, PoolError, TransferError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant, MessengerAddress

_COPY_TIMEOUT_S = 60.0
"""Seconds that one copy between messengers may take."""
_ROOM_TIMEOUT_S = 10.0
"""Seconds for which each end of a copy waits for a page."""


class Replicas(NamedTuple):
    """The instances that hold a block. `num_hosts`: the number of their hosts."""

    instances: list[str]
    num_hosts: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool that answers, and whether it has a copy of the block."""

    backend: Backend
    address: MessengerAddress
    has_copy: bool


def change_replica(backends: Sequence[Backend], key: BlockKey, num_replicas: int) -> Replicas:
    """Make or remove copies as `KVCachePool.change_replica` does, with the same errors."""
    if num_replicas < 1:
        raise PoolError(f"{num_replicas} copies wanted, the least is 1; use remove to have none")
    pools, lost = _look(backends, key)
    reasons = list(map(str, lost))
    owners = [pool for pool in pools if pool.has_copy]
    others = [pool for pool in pools if not pool.has_copy]
    if not owners:
        raise PoolError(f"there is no copy of {key.hex()} in the {len(pools)} pools that are connected")
    if num_replicas > len(pools):
        reasons.insert(0, f"{len(pools)} pools are connected")
        raise _too_few(len(owners), num_replicas, reasons)
    while len(owners) < num_replicas and others:
        target = least_used_host(others, owners)
        others.remove(target)
        try:
            _copy(key, owners, target.backend)
        except (MooncakeError, Unreachable) as error:
            reasons.append(f"{target.address.instance}: {error}")
        else:
            owners.append(target)
    while len(owners) > num_replicas:
        surplus = most_used_host(owners)
        _remove(key, surplus.backend)
        owners.remove(surplus)
    if len(owners) < num_replicas:
        raise _too_few(len(owners), num_replicas, reasons)
    return Replicas(
        [pool.address.instance for pool in owners], len({pool.address.host_id for pool in owners})
    )


def _look(backends: Sequence[Backend], key: BlockKey) -> tuple[list[_Pool], list[Unreachable]]:
    """Return the pools that answer, each instance once, and the errors of the pools that do not."""

    def look(connection: PoolConnection) -> tuple[MessengerAddress, bool]:
        located = connection.call(Lookup(connection.next_id(), [key]), Located)
        return connection.address, located.locations != b"\0"

    pools: dict[str, _Pool] = {}
    lost: list[Unreachable] = []
    for backend in backends:
        try:
            address, has_copy = backend.run(look)
        except Unreachable as error:
            lost.append(error)
        else:
            pools.setdefault(address.instance, _Pool(backend, address, has_copy))
    if not pools:
        raise no_answer(lost)
    return list(pools.values()), lost


def least_used_host(candidates: Sequence[_Pool], owners: Sequence[_Pool]) -> _Pool:
    """Return the first candidate on the host with the fewest copies."""
    num_copies = Counter(pool.address.host_id for pool in owners)
    return min(candidates, key=lambda pool: num_copies[pool.address.host_id])


def most_used_host(owners: Sequence[_Pool]) -> _Pool:
    """Return the last owner on the host with the most copies."""
    num_copies = Counter(pool.address.host_id for pool in owners)
    return max(reversed(owners), key=lambda pool: num_copies[pool.address.host_id])


def _copy(key: BlockKey, sources: Sequence[_Pool], target: Backend) -> None:
    """Copy the block from the first source that can send it.

    Raises Unreachable if the target is lost, the target's error if the target refuses, else the error of the
    last source.
    """
    errors: list[MooncakeError] = []
    for source in sources:
        try:
            target.run(lambda connection: _receive(connection, key, source.backend))  # noqa: B023
        except TransferError as error:
            errors.append(error)
        else:
            return
    raise errors[-1]


def _receive(target: PoolConnection, key: BlockKey, source: Backend) -> None:
    reservation = target.reserve([key], _ROOM_TIMEOUT_S)
    try:
        if reservation.blocks[0].sealed:
            return  # another client has just stored it there
        grant = target.call(OpenGrant(target.next_id(), reservation.reservation_id), Granted).grant
        try:
            source.run(lambda connection: _send(connection, key, grant))
        except Unreachable as error:
            raise TransferError(f"its source is lost: {error}") from error
        arrived = AwaitArrived(target.next_id(), reservation.reservation_id)
        target.call(arrived, Done, _COPY_TIMEOUT_S)
    finally:
        target.release(reservation.reservation_id)


def _send(source: PoolConnection, key: BlockKey, grant: Grant) -> None:
    reservation = source.reserve([key], _ROOM_TIMEOUT_S)
    try:
        if not reservation.blocks[0].sealed:
            raise TransferError(f"{source.address.instance} has lost the block meanwhile")
        start = StartSend(source.next_id(), reservation.reservation_id, grant, f"replica of {key.hex()}")
        source.call(start, Done)
        source.call(AwaitSent(source.next_id(), reservation.reservation_id), Done, _COPY_TIMEOUT_S)
    finally:
        source.release(reservation.reservation_id)


def _remove(key: BlockKey, backend: Backend) -> None:
    try:
        backend.run(lambda connection: connection.call(RemoveBlocks(connection.next_id(), [key]), Count))
    except Unreachable as error:
        raise PoolError(f"a copy too many cannot be removed: {error}") from error


def _too_few(num_copies: int, num_wanted: int, reasons: Sequence[str]) -> PoolError:
    return PoolError(
        f"{num_wanted} copies wanted, there are {num_copies}: {'; '.join(reasons) or 'no other pool is left'}"
    )
