"""Real messenger processes on memfds, and helper functions that behave like their workers."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.config.sections import KVCacheConfig, MessengerConfig, SecurityConfig, TransportChoice
from mooncake.messages.blocks import BlockKey, KVLayout, block_keys, root_key
from mooncake.messages.pools import PoolStats
from mooncake.node.process_config import MessengerProcess
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S
from tests.kvstore.forked import ForkedMessenger

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")
FINGERPRINT = "f" * 32
CLUSTER_KEY = ClusterKey.generate()


SEGMENT_PAGE_BYTES = LAYOUT.block_bytes + 4096


class Node:
    """One instance's messenger process, and the memory that outlives the process."""

    def __init__(self, folder: Path, name: str, segment_bytes: int, transport: TransportChoice) -> None:
        self.name = name
        self.socket_path = str(folder / f"{name}.sock")
        self.peer_socket_path = str(folder / f"{name}-peer.sock")
        self.incarnation = 0
        self.transport: TransportChoice = transport
        self.ack_timeout_s = 30.0
        self.cluster_key = CLUSTER_KEY
        self.kvcache = KVCacheConfig()
        self.security = SecurityConfig()
        self.event_endpoints = f"ipc://{folder}/{name}-ev", f"ipc://{folder}/{name}-rp"
        self.segment_fd = os.memfd_create(name)
        os.posix_fallocate(self.segment_fd, 0, segment_bytes)
        self.network: Path | None = None
        """The network namespace of the messenger; None for that of the tests."""
        self.process: ForkedMessenger | None = None

    @property
    def settings(self) -> MessengerConfig:
        return MessengerConfig(transport=self.transport, ack_timeout_s=self.ack_timeout_s)

    def start(self) -> None:
        """Start a messenger in its next incarnation, on the same memory."""
        self.incarnation += 1
        config = MessengerProcess(
            cluster_key=self.cluster_key,
            settings=self.settings,
            kvcache=self.kvcache,
            security=self.security,
            instance=self.name,
            incarnation=self.incarnation,
            worker_socket=self.socket_path,
            peer_socket=self.peer_socket_path,
            event_endpoints=self.event_endpoints,
            segment_fd=self.segment_fd,
        )
        if self.process is not None:
            self.process.hang_up()
        self.process = ForkedMessenger(config, self.network)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    async def connect(self, *, fingerprint: str = FINGERPRINT, layout: KVLayout = LAYOUT) -> WorkerClient:
        return await WorkerClient.connect(
            self.socket_path,
            instance=self.name,
            incarnation=self.incarnation,
            fingerprint=fingerprint,
            layout=layout,
            timeout_s=DEADLINE_S,
        )

    def socket_files(self) -> set[str]:
        paths = (Path(self.socket_path), Path(self.peer_socket_path))
        return {path.name for path in paths if path.exists()}

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        os.close(self.segment_fd)


class StartNode(Protocol):
    """The type of the fixture `start_node`."""

    def __call__(self, name: str, *, num_pages: int = 16, transport: TransportChoice = "auto") -> Node: ...


def prompt_keys(num_blocks: int, first_token: int = 0) -> list[BlockKey]:
    tokens = range(first_token, first_token + num_blocks * LAYOUT.block_size)
    return block_keys(tokens, LAYOUT.block_size, root_key(FINGERPRINT))


def block_bytes(key: BlockKey | None, layer: int, heads: range = LAYOUT.heads) -> bytes:
    """Return the bytes of one layer of a block, or of some of its heads, as a model would compute them."""
    seed = int.from_bytes(key or b"private", "little") + layer
    data = np.random.default_rng(seed).bytes(LAYOUT.layer_bytes)
    return data[heads.start * LAYOUT.head_bytes : heads.stop * LAYOUT.head_bytes]


async def write_layers(
    client: WorkerClient, reservation: Reservation, keys: Sequence[BlockKey | None], layers: range
) -> None:
    """Write and commit `layers` (of this segment) of every block that is not sealed, as a prefill does."""
    pages, checksums = [], []
    first_layer, heads = client.segment.layout.first_layer, client.segment.layout.heads
    for key, block in zip(keys, reservation.blocks, strict=True):
        if not block.sealed:
            for layer in layers:
                client.segment.layer_view(block.page, layer)[:] = block_bytes(key, first_layer + layer, heads)
            pages.append(block.page)
            checksums.append(
                [xxhash.xxh3_64_intdigest(client.segment.layer_view(block.page, layer)) for layer in layers]
            )
    await client.commit(reservation.reservation_id, layers, pages, checksums)


def assert_holds(client: WorkerClient, reservation: Reservation, keys: Sequence[BlockKey | None]) -> None:
    layout = client.segment.layout
    for key, block in zip(keys, reservation.blocks, strict=True):
        for position, layer in enumerate(layout.layers):
            assert client.segment.layer_view(block.page, position) == block_bytes(key, layer, layout.heads)


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def unused(stats: PoolStats) -> bool:
    """Return whether no page is in use, and none is lost."""
    assert stats.integrity is None
    return stats.num_used == stats.num_reserved == stats.num_quarantined == stats.num_reservations == 0


async def until(client: WorkerClient, condition: Callable[[PoolStats], bool]) -> PoolStats:
    """Poll the messenger, and return its first counters that fulfil `condition`."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats = await client.stats(check_integrity=True)
            if condition(stats):
                return stats
