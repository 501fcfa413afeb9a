"""Keys that open single ranges of the registered memory to a peer, for one transfer.

There are two kinds of keys. The key of a memory window of type 2 is valid for one queue pair, and so for one
peer. Where the device does not enforce windows, each range is registered separately: this is slower, and any
connected peer that knows the key can use it. Keys of both kinds are limited to their range, and end
immediately when the range is closed.

Owns: opening and closing the ranges. Does not know: transfers, pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Final

from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError, RdmaUnavailableError
from messenger.rdma.memory import LOCAL_WRITE, RdmaMemory
from messenger.rdma.verbs import load_verbs
from messenger.rdma.work import MAX_CHAIN
from messenger.transport.exposures import Range
from messenger.transport.transports import Remedy

_TYPE_2: Final = 2  # enum ibv_mw_type
_BIND: Final = 8  # enum ibv_wr_opcode, IBV_WR_BIND_MW
_SIGNALED: Final = 2


class Access(IntFlag):
    """The rights of a peer in a window (values of enum ibv_access_flags)."""

    WRITE = 2
    READ = 4


@dataclass(eq=False, slots=True)
class OpenRanges:
    """Ranges that are open to a peer: `remote_keys[i]` is the key of the i-th range.

    The peer uses the addresses of the registered memory.
    """

    remote_keys: list[int]
    openings: list[Any]
    """The pyverbs windows or regions of the ranges."""


async def open_windows(
    endpoint: Endpoint, memory: RdmaMemory, ranges: Sequence[Range], access: Access = Access.WRITE
) -> OpenRanges:
    """Open `ranges`, and nothing else, to the peer of a connected endpoint, and return their keys.

    Raises RdmaError.
    """
    for each in ranges:
        if each.offset < 0 or not 0 < each.size_bytes <= memory.size_bytes - each.offset:
            raise RdmaError(
                f"{each} is not within the {memory.size_bytes} bytes of registered memory", Remedy.GIVE_UP
            )
    endpoint.check_usable()
    opened = OpenRanges([], [])
    try:
        if endpoint.adapter.has_windows:
            await _bind_windows(endpoint, opened, memory, ranges, access)
        else:
            _register(endpoint, opened, memory, ranges, access)
    except load_verbs().Error as error:
        close_windows(endpoint, opened)
        raise RdmaUnavailableError(
            f"{endpoint.adapter.device} cannot open {len(ranges)} ranges to {endpoint.peer}: {error}"
        ) from error
    except BaseException:
        close_windows(endpoint, opened)
        raise
    return opened


def close_windows(endpoint: Endpoint, opened: OpenRanges) -> None:
    """Close ranges that `open_windows` has opened: their keys open nothing afterwards. Idempotent.

    A peer that still uses the ranges gets an error, which breaks the endpoint. Does nothing when the endpoint
    is closed.
    """
    try:
        for opening in opened.openings:
            if opening in endpoint.openings:
                endpoint.openings.remove(opening)
                opening.close()
    except load_verbs().Error as error:  # the device is in trouble: without the queue pair nothing is open
        endpoint.revoke(f"closed, a range of it could not be: {error}")
    opened.openings.clear()


def _register(
    endpoint: Endpoint, opened: OpenRanges, memory: RdmaMemory, ranges: Sequence[Range], access: Access
) -> None:
    rights = LOCAL_WRITE | int(access)
    for offset, size_bytes in ranges:
        address = memory.address + offset
        region = load_verbs().mr.MR(endpoint.adapter.domain, size_bytes, rights, address=address)
        endpoint.openings.add(region)
        opened.openings.append(region)
        opened.remote_keys.append(region.rkey)


async def _bind_windows(
    endpoint: Endpoint, opened: OpenRanges, memory: RdmaMemory, ranges: Sequence[Range], access: Access
) -> None:
    for _range in ranges:
        window = load_verbs().mr.MW(endpoint.adapter.domain, _TYPE_2)
        endpoint.openings.add(window)
        opened.openings.append(window)
    if ranges:
        await endpoint.perform(_Binding(opened, memory, ranges, access))


@dataclass(slots=True)
class _Binding:
    """The requests that bind windows to their ranges."""

    opened: OpenRanges
    memory: RdmaMemory
    ranges: Sequence[Range]
    access: Access

    @property
    def is_posted(self) -> bool:
        return len(self.opened.remote_keys) == len(self.ranges)

    def post(self, qp: Any, max_requests: int) -> tuple[int, int]:
        verbs = load_verbs()
        begin = len(self.opened.remote_keys)
        end = min(begin + min(max_requests, MAX_CHAIN), len(self.ranges))
        requests: list[Any] = []
        next_request, flags = None, _SIGNALED  # the last one only
        for position in reversed(range(begin, end)):
            offset, size_bytes = self.ranges[position]
            address = self.memory.address + offset
            request = verbs.wr.SendWR(opcode=_BIND, send_flags=flags, next_wr=next_request)
            request.set_bind_wr(
                self.opened.openings[position],
                verbs.mr.MWBindInfo(self.memory.region, address, size_bytes, int(self.access)),
            )
            requests.insert(0, request)
            next_request, flags = request, 0
        qp.post_send(requests[0])
        self.opened.remote_keys += [request.rkey for request in requests]
        for request in requests:
            request.close()  # pyverbs does not free it by itself
        return end - begin, 0
