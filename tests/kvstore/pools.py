"""Real messengers for the tests of pool clients: in this process's host, over TCP, and by the CLI."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import ByteSize

from kvstore.client.client import KVCachePool
from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT, Segment
from mooncake.config.sections import KVCacheConfig
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import PoolStats
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT, Node
from tests.ports import free_port


class Pool(Node):
    """A messenger that also listens for clients on TCP. It has a layout once `ready` has returned."""

    def __init__(
        self, folder: Path, name: str, num_pages: int, layout: KVLayout, num_ssd_blocks: int = 0
    ) -> None:
        page_bytes = -(-layout.block_bytes // ALIGNMENT) * ALIGNMENT + record_bytes(layout.num_layers)
        super().__init__(folder, name, num_pages * page_bytes + 3 * ALIGNMENT, "auto")
        port = free_port()
        self.kvcache = KVCacheConfig(
            listen=f"127.0.0.1:{port}",
            low_watermark=0,
            high_watermark=0,
            ssd_dirs=[folder] if num_ssd_blocks else [],
            ssd_bytes=ByteSize(num_ssd_blocks * page_bytes + 3 * ALIGNMENT),
        )
        self.layout = layout
        self.key_file = key_file_in(folder)
        self.unix = f"unix:{self.socket_path}"
        self.tcp = f"tcp://127.0.0.1:{port}"

    def ready(self) -> "Pool":
        """Wait until the messenger serves, on both its sockets, and has this layout."""
        for address in (self.unix, self.tcp):
            with contextlib.closing(self.client(address)):
                pass
        return self

    def client(self, address: str | None = None, timeout_s: float = DEADLINE_S) -> KVCachePool:
        return connected(
            address or self.unix,
            fingerprint=FINGERPRINT,
            layout=self.layout,
            timeout_s=timeout_s,
            key_file=self.key_file,
        )

    def damage(self, key: BlockKey, layer: int) -> None:
        """Flip a byte of a stored block, without the messenger's knowledge."""
        segment = Segment.open(self.segment_fd)
        assert segment is not None
        table = segment.page_table()
        (page,) = [page for page in range(segment.num_pages) if table.key(page) == key and table.states[page]]
        segment.layer_view(page, layer)[7] ^= 0xFF


class Pools:
    """A starter of pools in a folder. They end with this context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = contextlib.ExitStack()

    def start(
        self, name: str = "a", num_pages: int = 16, layout: KVLayout = LAYOUT, num_ssd_blocks: int = 0
    ) -> Pool:
        pool = Pool(self.folder, name, num_pages, layout, num_ssd_blocks)
        self._started.callback(pool.close)
        pool.start()
        return pool.ready()

    def __enter__(self) -> "Pools":
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()


def key_file_in(folder: Path) -> Path:
    """Return the file with the cluster key of all messengers of these tests."""
    path = folder / "cluster.key"
    if not path.exists():
        CLUSTER_KEY.save(path)
    return path


def connected(*addresses: str, **options: object) -> KVCachePool:
    """Return a client, once the pool answers."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return KVCachePool.connect(*addresses, **options)  # type: ignore[arg-type]
        except PoolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def wait_until_listening(address: str) -> None:
    """Wait until connections are accepted at a `unix:` or `tcp://` address. A messenger opens TCP last."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            _connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def _connect(address: str) -> None:
    """Open a connection and close it again. Raises OSError if no process accepts connections at `address`."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(address.removeprefix("unix:"))
    else:
        host, port = address.removeprefix("tcp://").split(":")
        socket.create_connection((host, int(port))).close()


def until(client: KVCachePool, condition: Callable[[PoolStats], bool]) -> PoolStats:
    """Poll the only pool of a client, and return its first counters that fulfil `condition`."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        (stats,) = client.stats(check_integrity=True).values()
        assert stats.integrity is None
        if condition(stats):
            return stats
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def nothing_reserved(stats: PoolStats) -> bool:
    return stats.num_reserved == stats.num_quarantined == stats.num_reservations == stats.num_leases == 0


def keys_of(num_keys: int) -> list[BlockKey]:
    """Return keys that no other test uses."""
    return [random.randbytes(16) for _ in range(num_keys)]


def block_of(key: BlockKey, layout: KVLayout = LAYOUT) -> bytes:
    """Return the block that is stored under `key`."""
    seed = int.from_bytes(key, "little")
    return np.random.default_rng(seed).bytes(layout.block_bytes)


def buffers(num_buffers: int, num_bytes: int = LAYOUT.block_bytes) -> list[bytearray]:
    return [bytearray(num_bytes) for _ in range(num_buffers)]
