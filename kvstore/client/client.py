"""The KVCache pool as a library: any program stores, finds and reads blocks. See docs/kvcache-pool.md.

Calls block, and need no event loop. Any number of threads may use one `KVCachePool`. Blocks of a pool on the
same host are copied from and to shared memory; only keys and page numbers pass through its socket.

Owns: which pool gets which call. Does not know: connections, pages.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvstore.client.arguments import bytes_of, checked_layers
from kvstore.client.backends import Backend, Backends, Unreachable, connect_all, no_answer
from kvstore.client.connections import CopyLayers, PoolConnection, PoolURL, key_for
from kvstore.client.leases import Lease
from kvstore.client.mapped import MappedConnection
from kvstore.client.replicas import Replicas, change_replica
from kvstore.protocol.answers import LOCATIONS, BlockInfo, Count, Listing, Located, Stats, Verified
from kvstore.protocol.calls import (
    GetStats,
    ListBlocks,
    Lookup,
    PinBlocks,
    Prefetch,
    RemoveBlocks,
    UnpinBlocks,
    VerifyBlocks,
)
from kvstore.protocol.frames import LONGEST_WAIT_S, max_keys
from mooncake.errors import ConfigError, PoolError
from mooncake.messages.blocks import KEY_BYTES, BlockKey, KVLayout
from mooncake.messages.pools import PoolStats, Tier

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

PUT_TIMEOUT_S = 30.0
"""Seconds for which a put waits for pages by default."""
_BATCH_BYTES = 64 << 20
"""The most bytes of blocks in one call.

The limit keeps calls short, and leaves pages for other clients.
"""
_LISTED_AT_ONCE = 1000
"""The most blocks in one answer to `ListBlocks`."""
Answer = TypeVar("Answer")


class Verification(NamedTuple):
    """The result of `verify`.

    `num_intact`: the number of intact blocks. `damaged`: the keys of blocks with a damaged copy, which was
    dropped. A block that was removed meanwhile, or has a copy that cannot be read now, is in neither field.
    """

    num_intact: int
    damaged: list[BlockKey]


class KVCachePool:
    """A client of one or more pools, each the pool of one instance. `connect` makes a client.

    A key has 16 bytes, a block the layout's `block_bytes`. Puts go to the first pool. Reads go to the first
    pool; blocks that it lacks are read from the other pools. A pool that does not answer counts as empty, and
    is tried again about a second later. If no pool answers, the call raises an error: MismatchError if a pool
    has come back for another model or layout, ConfigError if a pool has come back with another cluster key,
    else PoolError. A client is a context manager.
    """

    def __init__(self, backends: Backends, fingerprint: str, layout: KVLayout) -> None:
        self.fingerprint = fingerprint
        """Fingerprint of the model to which the blocks belong."""
        self.layout = layout
        self._backends = backends
        self._pid = os.getpid()
        self._is_closed = False

    @classmethod
    def connect(
        cls,
        *addresses: str,
        fingerprint: str | None = None,
        layout: KVLayout | None = None,
        timeout_s: float = 10.0,
        key_file: Path | str | None = None,
        formats_anew: bool = False,
    ) -> "KVCachePool":
        """Connect to the pools at `addresses`.

        An address is `unix:/path/worker-0.sock` for a pool on this host, `tcp://host:port` for a pool on
        another host.

        `fingerprint` and `layout` describe the caller's blocks; by default the pools' own values are used. If
        both are given, a new pool that answers now is formatted for them. A pool that comes back empty later
        may be meant for another model, and is not formatted again. With `formats_anew` it is formatted again
        for the same blocks.

        A pool that answers nothing for `timeout_s`, now or later, counts as gone. `key_file` holds the
        cluster's key: both sides of a `tcp://` address prove that they know this key. The file is read once.
        A `unix:` address needs no key: only the pool's own Unix user can open the socket.

        Raises MismatchError, naming both sides, if a pool holds other blocks; PoolError if no pool answers;
        ConfigError for an invalid address, and for a key that is missing, unreadable or not the pool's.
        """
        if not addresses:
            raise ConfigError("name at least one pool: unix:/path/of.sock or tcp://host:port")
        if not 0 < timeout_s <= LONGEST_WAIT_S:
            raise ConfigError(
                f"a timeout of {timeout_s} s; it must be positive, at most {LONGEST_WAIT_S:g} s"
            )
        urls = [PoolURL.parse(address) for address in addresses]
        key = key_for(urls, key_file)
        return cls(*connect_all(urls, key, fingerprint, layout, timeout_s, formats_anew=formats_anew))

    @property
    def addresses(self) -> list[str]:
        """The addresses given to `connect`, in the order in which the pools are asked."""
        return [backend.url.text for backend in self._backends.all]

    # -- blocks -----------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: "Sequence[ReadableBuffer]",
        timeout_s: float = PUT_TIMEOUT_S,
    ) -> None:
        """Store `blocks` under `keys`. When the call returns, all these blocks are sealed.

        A block that the pool already has is not written again. The call goes to the first pool that answers,
        and waits up to `timeout_s` seconds for room in it. Raises PoolFullError if there is still no room;
        some of the blocks may have been stored then.
        """
        views = [bytes_of(block, self.layout, self.layout.num_layers) for block in blocks]
        self._check(keys, len(views))
        if not 0 <= timeout_s <= LONGEST_WAIT_S:
            raise PoolError(f"a timeout of {timeout_s} s; it must be 0 to {LONGEST_WAIT_S:g} s")
        by_key = dict(zip(keys, views, strict=True))
        distinct = list(by_key)
        for part in self._batches(len(distinct), self.layout.num_layers):
            some_keys = distinct[part]
            some_blocks = [by_key[key] for key in some_keys]
            self._backends.first(lambda connection: connection.put(some_keys, some_blocks, timeout_s))  # noqa: B023

    def put_layers(
        self, keys: Sequence[BlockKey], copy: CopyLayers, timeout_s: float = PUT_TIMEOUT_S
    ) -> None:
        """Store blocks while they are computed, layer by layer over all blocks.

        `copy(layers, positions, addresses)` copies `layers` of the blocks at `positions` in `keys`, each to
        its address. It returns the xxh3-64 of each layer, `[block][layer]`, and may wait until the layers are
        computed. An error that `copy` raises ends the call; blocks that are not complete then are not
        stored. If a pool is lost, `copy` may be called again from the first layer on. Keys must be distinct.
        Otherwise the call is like `put`.
        """
        self._check(keys)
        self._backends.first(lambda connection: connection.put_layers(keys, copy, timeout_s))

    def get(
        self, keys: Sequence[BlockKey], out: "Sequence[WriteableBuffer]", layers: range | None = None
    ) -> list[bool]:
        """Copy the blocks, or only consecutive `layers` of each, into the caller's buffers.

        Returns for each block: True if it was read and verified; False if it is missing, or was damaged and
        has been dropped. The buffer of a block that was not read may have changed.
        """
        layers = checked_layers(layers, self.layout)
        views = [bytes_of(buffer, self.layout, len(layers), writable=True) for buffer in out]
        self._check(keys, len(views))
        is_there = [False] * len(keys)
        for part in self._batches(len(keys), len(layers)):

            def read(connection: PoolConnection, wanted: Sequence[int]) -> Sequence[int]:
                found = connection.get([keys[i] for i in wanted], [views[i] for i in wanted], layers)
                for i, is_found in zip(wanted, found, strict=True):
                    is_there[i] = is_found
                return [i for i in wanted if not is_there[i]]

            self._backends.in_turn(range(len(keys))[part], read)
        return is_there

    def exists(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """Return each block's fastest tier in the first pool that has the block; None if no pool has it.

        The call does not count as a use of the blocks.
        """
        self._check(keys)
        tiers: list[Tier | None] = [None] * len(keys)
        for part in self._batches(len(keys), 0):

            def look(connection: PoolConnection, wanted: Sequence[int]) -> Sequence[int]:
                lookup = Lookup(connection.next_id(), [keys[i] for i in wanted])
                for i, location in zip(wanted, connection.call(lookup, Located).locations, strict=True):
                    tiers[i] = LOCATIONS[location]
                return [i for i in wanted if tiers[i] is None]

            self._backends.in_turn(range(len(keys))[part], look)
        return tiers

    def prefix_len(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading blocks that are stored, up to the first missing block."""
        return sum(1 for _ in itertools.takewhile(lambda tier: tier is not None, self.exists(keys)))

    def lease(self, keys: Sequence[BlockKey], ttl_s: float = 30.0) -> Lease:
        """Lease blocks of pools on this host for `ttl_s` seconds, to read them in place without a copy.

        Raises PoolError if this client has no pool on this host.
        """
        self._check(keys)
        local = Backends([backend for backend in self._backends.all if backend.url.tcp is None])
        if not local.all:
            raise PoolError("blocks can be leased only from a pool on this host (unix:...); get copies them")
        lease = Lease(keys)
        try:
            for part in self._batches(len(keys), self.layout.num_layers):

                def take(connection: PoolConnection, wanted: Sequence[int]) -> Sequence[int]:
                    assert isinstance(connection, MappedConnection)
                    leased = connection.lease([keys[i] for i in wanted], ttl_s)
                    return lease.add(connection, leased, wanted)

                local.in_turn(range(len(keys))[part], take)
        except BaseException:
            lease.end()
            raise
        return lease

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Begin to promote blocks from SSD to DRAM, for later reads."""
        self._check(keys)
        self._of_each(keys, lambda connection, some_keys: connection.notify(Prefetch(some_keys)))

    # -- what becomes of blocks -------------------------------------------------------------------

    def pin(self, keys: Sequence[BlockKey], ttl_s: float, hard: bool = False) -> int:
        """Pin these blocks in DRAM for `ttl_s` seconds. Returns the number of pinned copies.

        A soft pin keeps its block as long as other blocks can be evicted, a `hard` pin in any case. Pins
        outlive this client. A soft pin does not replace a hard one. Raises PoolError if hard pins would take
        more than half of a pool.
        """
        self._check(keys)

        def pin(pool: PoolConnection, some_keys: list[BlockKey]) -> int:
            return pool.call(PinBlocks(pool.next_id(), some_keys, ttl_s, hard), Count).num_blocks

        return sum(self._of_each(keys, pin, moves_blocks=True))

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """Remove the pins of these blocks. Returns the number of removed pins."""
        return self._count(keys, UnpinBlocks)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Remove these blocks from DRAM and SSD of every pool. Reads in flight may finish.

        Returns the number of removed blocks. A block counts once for each pool that had it.
        """
        return self._count(keys, RemoveBlocks)

    def clear(self) -> int:
        """Remove every block from every pool. Returns the number of removed blocks, as `remove` does."""
        self._check([])

        def clear(connection: PoolConnection) -> int:
            return connection.call(RemoveBlocks(connection.next_id(), None), Count).num_blocks

        return sum(self._backends.each(clear))

    def change_replica(self, key: BlockKey, num_replicas: int) -> Replicas:
        """Make or remove copies until exactly `num_replicas` instances hold the block.

        A new copy is made on a host with the fewest copies, and a surplus copy is removed from a host with
        the most. Copies that need not be removed stay where they are. Bytes go from messenger to messenger.

        Raises PoolError if that number cannot be reached. The message says how many copies there are now, and
        why.
        """
        self._check([key])
        return change_replica(self._backends.all, key, num_replicas)

    # -- looking after pools ----------------------------------------------------------------------

    def stats(self, check_integrity: bool = False) -> dict[str, PoolStats]:
        """Return the statistics of every pool that answers, by instance name.

        `check_integrity`: check every page now; the pool answers no other call meanwhile. By default
        `integrity` and `num_orphaned` are results of the latest check, which a pool makes when it is idle.
        """
        self._check([])

        def ask(connection: PoolConnection) -> tuple[str, PoolStats]:
            call = GetStats(connection.next_id(), check_integrity)
            return connection.address.instance, connection.call(call, Stats).stats

        return dict(self._backends.each(ask))

    def list_blocks(self) -> Iterator[tuple[str, BlockInfo]]:
        """Yield every copy of every block in the pools that answer, with the name of the copy's instance.

        Copies that are stored or removed meanwhile may be missed, or named twice. Raises PoolError,
        ConfigError or MismatchError if no pool answers.
        """
        self._check([])
        lost: list[Unreachable] = []
        for backend in self._backends.all:
            try:
                yield from _list_blocks(backend)
            except Unreachable as error:
                lost.append(error)
        if len(lost) == len(self._backends.all):
            raise no_answer(lost)

    def verify(self, keys: Sequence[BlockKey]) -> Verification:
        """Have every copy of these blocks compared with its checksums. Damaged copies are dropped."""
        self._check(keys)

        def verify(connection: PoolConnection, some_keys: list[BlockKey]) -> Verified:
            return connection.call(VerifyBlocks(connection.next_id(), some_keys), Verified)

        answers = self._of_each(keys, verify, moves_blocks=True)
        damaged = itertools.chain.from_iterable(answer.damaged for answer in answers)
        return Verification(sum(answer.num_intact for answer in answers), list(dict.fromkeys(damaged)))

    def close(self) -> None:
        """End all connections and leases. Calls in progress in other threads may still finish. Idempotent."""
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # nothing of the parent's is open here
        for backend in self._backends.all:
            backend.close()

    def __enter__(self) -> "KVCachePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------

    def _count(self, keys: Sequence[BlockKey], call: type[UnpinBlocks | RemoveBlocks]) -> int:
        """Make the call with every pool that answers. Returns the sum of the pools' counts."""
        self._check(keys)
        return sum(
            self._of_each(keys, lambda pool, some: pool.call(call(pool.next_id(), some), Count).num_blocks)
        )

    def _of_each(
        self,
        keys: Sequence[BlockKey],
        use: Callable[[PoolConnection, list[BlockKey]], Answer],
        *,
        moves_blocks: bool = False,
    ) -> list[Answer]:
        """Call `use` with every pool that answers, for one slice of `keys` after the other.

        Returns all results. A slice has no more keys than one call may name.
        """
        answers: list[Answer] = []
        for part in self._batches(len(keys), self.layout.num_layers if moves_blocks else 0):
            some_keys = list(keys[part])
            answers += self._backends.each(lambda connection: use(connection, some_keys))  # noqa: B023
        return answers

    def _batches(self, num_keys: int, num_layers: int) -> Iterator[slice]:
        """Yield slices of a list of keys, one for each call to a pool.

        `num_layers`: the number of layers of each block that a call reads or writes; 0 for a call that only
        names blocks.
        """
        stride = max_keys(num_layers)
        if num_layers:
            stride = max(1, min(stride, _BATCH_BYTES // (num_layers * self.layout.layer_bytes)))
        return (slice(start, start + stride) for start in range(0, num_keys, stride))

    def _check(self, keys: Sequence[BlockKey], num_blocks: int | None = None) -> None:
        """Check the arguments of a call.

        Raises PoolError if this client is closed or was inherited by a fork, if a key is invalid, or if the
        numbers of keys and blocks differ.
        """
        if self._is_closed:
            raise PoolError("this KVCachePool is closed; connect again")
        if os.getpid() != self._pid:
            raise PoolError("this KVCachePool belongs to the parent process; connect again in the child")
        if num_blocks is not None and num_blocks != len(keys):
            raise PoolError(f"{len(keys)} keys came with {num_blocks} blocks")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise PoolError(f"a key has {KEY_BYTES} bytes, this one {len(key)}")


def _list_blocks(backend: Backend) -> Iterator[tuple[str, BlockInfo]]:
    cursor: int | None = 0

    def ask(connection: PoolConnection) -> tuple[str, Listing]:
        assert cursor is not None
        call = ListBlocks(connection.next_id(), cursor, _LISTED_AT_ONCE)
        return connection.address.instance, connection.call(call, Listing)

    while cursor is not None:
        instance, listing = backend.run(ask)
        yield from ((instance, block) for block in listing.blocks)
        cursor = listing.next_cursor
