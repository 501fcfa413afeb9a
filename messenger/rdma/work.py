"""Work requests made of slices.

Making a work request, a pyverbs object, takes some microseconds, and its memory is not freed automatically.
So the requests of a chain are made and linked once, and filled in again for every chain: posting copies them
to the device's queue. A chain of n requests is the last n requests of the list, because pyverbs can set a
request's link to the next request but cannot remove the link.

Owns: cutting and merging slices, reusable work requests. Does not know: queues, completions.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from messenger.rdma.errors import RdmaError
from messenger.rdma.verbs import load_verbs
from messenger.transport.transports import Remedy

Slices = Sequence[tuple[int, int, int]] | npt.NDArray[np.integer[Any]]
"""The slices of an operation. A slice is (offset in the local memory, remote address, number of bytes)."""
Keys = int | Sequence[int]
"""One remote key for all slices, or a key for each slice."""

MAX_PIECE_BYTES: Final = 1 << 20
MAX_CHAIN: Final = 16
MAX_CHAIN_BYTES: Final = 2 << 20
RDMA_WRITE: Final = 0  # enum ibv_wr_opcode
RDMA_READ: Final = 4
_SIGNALED: Final = 2  # enum ibv_send_flags


class Span(Protocol):
    """The address and size of the local memory to which slices refer."""

    address: int
    size_bytes: int


class Pieces(NamedTuple):
    """Pieces that become work requests: local and remote address, length and remote key of each."""

    local_addresses: list[int]
    remote_addresses: list[int]
    num_bytes: list[int]
    remote_keys: list[int]

    def chain_end(self, begin: int, max_pieces: int) -> int:
        """Return the end (exclusive) of the chain that begins with piece `begin`.

        The chain has at most `max_pieces` pieces.
        """
        end, chain_bytes = begin, 0
        limit = min(begin + min(max_pieces, MAX_CHAIN), len(self.num_bytes))
        while end < limit and (end == begin or chain_bytes + self.num_bytes[end] <= MAX_CHAIN_BYTES):
            chain_bytes += self.num_bytes[end]
            end += 1
        return end


def cut(slices: Slices, keys: Keys, memory: Span, max_piece_bytes: int) -> Pieces:
    """Return the pieces of slices. Adjacent slices are joined, long slices cut, empty slices left out.

    Raises RdmaError for a slice outside the local memory, or an invalid key.
    """
    try:
        if not isinstance(keys, int) and len(keys) != len(slices):
            raise ValueError(f"{len(slices)} slices and {len(keys)} keys")
        table = np.empty((len(slices), 4), dtype=np.int64)
        table[:, :3] = np.asarray(slices, dtype=np.int64).reshape(-1, 3)
        table[:, 3] = keys
    except (OverflowError, ValueError) as error:
        raise RdmaError(f"slices and keys do not make sense: {error}", Remedy.GIVE_UP) from error
    table = table[table[:, 2] != 0]
    local, remote, length, key = table.T
    wrong = (table < 0).any(axis=1) | (length > memory.size_bytes - local) | (key >= 1 << 32)
    if wrong.any():
        offset, _there, num_bytes, its_key = table[wrong.argmax()].tolist()
        raise RdmaError(
            f"expected a range within {memory.size_bytes} bytes of registered memory and a key of 32 bits,"
            f" got {num_bytes} bytes at offset {offset} and key {its_key:#x}",
            Remedy.GIVE_UP,
        )
    if len(table) > 1:
        is_first = np.ones(len(table), dtype=np.bool_)
        is_first[1:] = (
            (local[1:] != local[:-1] + length[:-1])
            | (remote[1:] != remote[:-1] + length[:-1])
            | (key[1:] != key[:-1])
        )
        firsts = np.flatnonzero(is_first)
        length = np.add.reduceat(length, firsts)
        local, remote, key = local[firsts], remote[firsts], key[firsts]
    if (length > max_piece_bytes).any():
        counts = -(-length // max_piece_bytes)
        skipped = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * max_piece_bytes
        local, remote, key = (np.repeat(column, counts) for column in (local, remote, key))
        length = np.minimum(np.repeat(length, counts) - skipped, max_piece_bytes)
        local, remote = local + skipped, remote + skipped
    return Pieces((local + memory.address).tolist(), remote.tolist(), length.tolist(), key.tolist())


class Chain:
    """Reusable requests of one kind, filled in for one posting at a time."""

    def __init__(self, opcode: int) -> None:
        verbs = load_verbs()
        self._ranges = [verbs.wr.SGE(0, 0, 0) for _ in range(MAX_CHAIN)]
        self._requests: list[Any] = []
        next_request, flags = None, _SIGNALED  # the last one only
        for memory_range in reversed(self._ranges):
            request = verbs.wr.SendWR(
                opcode=opcode, num_sge=1, sg=[memory_range], send_flags=flags, next_wr=next_request
            )
            request.sg_list, next_request, flags = memory_range, request, 0
            self._requests.insert(0, request)

    def fill(self, pieces: Pieces, begin: int, end: int, local_key: int) -> Any:
        """Return the first request of a chain for pieces [begin, end), ready to post."""
        first = MAX_CHAIN - (end - begin)
        for position in range(begin, end):
            slot = first + position - begin
            memory_range = self._ranges[slot]
            memory_range.addr = pieces.local_addresses[position]
            memory_range.length = pieces.num_bytes[position]
            memory_range.lkey = local_key
            self._requests[slot].set_wr_rdma(pieces.remote_keys[position], pieces.remote_addresses[position])
        return self._requests[first]
