"""Our pool as a store of the workload: one messenger process and its client.

Owns: how a messenger is started for a benchmark, and how the client is used. Does not know: the comparison.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.kvstore.limits import ROOT
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Bytes
from benchmarks.servers import free_port
from kvstore.client.client import KVCachePool
from mooncake.config.sections import KVCacheConfig, MessengerConfig
from mooncake.errors import PoolError
from mooncake.messages.blocks import KVLayout
from mooncake.node.process_config import MessengerProcess
from mooncake.security.keys import ClusterKey

FINGERPRINT = "f" * 32
TIMEOUT_S = 30.0
SEGMENT_BYTES = WORKING_SET_BYTES + WORKING_SET_BYTES // 2
"""The bytes of our segment. In a segment of this size the pool never evicts."""

_SMALLEST = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16")
LAYOUTS = {
    4 << 10: _SMALLEST,
    **{
        size_bytes: KVLayout(
            num_layers, num_kv_heads=8, head_dim=128, block_size=block_size, dtype="bfloat16"
        )
        for size_bytes, num_layers, block_size in (
            (64 << 10, 1, 16),
            (256 << 10, 4, 16),
            (1 << 20, 8, 32),
            (4 << 20, 8, 128),
            (16 << 20, 8, 512),
        )
    },
}
"""The layouts of blocks, by the bytes of a block."""


class Messenger:
    """One messenger process with a pool in memory, and the addresses at which clients reach it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.unix_address = f"unix:{self._folder.name}/worker.sock"
        tcp_port = free_port()
        self.tcp_address = f"tcp://127.0.0.1:{tcp_port}"
        key = ClusterKey.generate()
        self.key_file = Path(self._folder.name, "cluster.key")
        key.save(self.key_file)
        segment_fd = os.memfd_create("benchmark")
        os.posix_fallocate(segment_fd, 0, SEGMENT_BYTES)
        config = MessengerProcess(
            cluster_key=key,
            settings=MessengerConfig(),
            kvcache=KVCacheConfig(listen=f"127.0.0.1:{tcp_port}"),
            instance="benchmark",
            incarnation=1,
            worker_socket=f"{self._folder.name}/worker.sock",
            peer_socket=f"{self._folder.name}/peer.sock",
            event_endpoints=(f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"),
            segment_fd=segment_fd,
        )
        command = [sys.executable, "-m", "kvstore.server.service"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[segment_fd], cwd=ROOT)
        os.close(segment_fd)
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


class OurStore:
    """Our pool as a store.

    `transport`: "unix" uses shared memory; "tcp" is for a client on another machine.
    """

    def __init__(self, transport: Literal["unix", "tcp"]) -> None:
        self._transport = transport
        self._resources = contextlib.ExitStack()

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        self.close()
        messenger = self._resources.enter_context(contextlib.closing(Messenger()))
        address = messenger.unix_address if self._transport == "unix" else messenger.tcp_address
        layout = LAYOUTS[sources.shape[1]]
        self._pool = self._resources.enter_context(_connect(address, layout, messenger.key_file))
        self._keys = [os.urandom(16) for _ in sources]
        self._sources = [memoryview(block) for block in sources]
        self._destinations = [memoryview(block) for block in destinations]

    def remove(self, indices: Sequence[int]) -> None:
        _check(self._pool.remove([self._keys[i] for i in indices]) == len(indices))

    def put(self, indices: Sequence[int]) -> None:
        self._pool.put([self._keys[i] for i in indices], [self._sources[i] for i in indices])

    def get(self, indices: Sequence[int]) -> None:
        keys = [self._keys[i] for i in indices]
        _check(all(self._pool.get(keys, [self._destinations[i] for i in indices])))

    def exists(self, indices: Sequence[int]) -> None:
        _check(None not in self._pool.exists([self._keys[i] for i in indices]))

    def lease(self, indices: Sequence[int]) -> None:
        with self._pool.lease([self._keys[i] for i in indices]) as lease:
            _check(None not in lease.blocks)

    def close(self) -> None:
        self._resources.close()


def _connect(address: str, layout: KVLayout, key_file: Path) -> KVCachePool:
    """Connect to the messenger as soon as it listens."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return KVCachePool.connect(
                address, fingerprint=FINGERPRINT, layout=layout, timeout_s=TIMEOUT_S, key_file=key_file
            )
        except PoolError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _check(is_whole: bool) -> None:
    if not is_whole:
        raise RuntimeError("the pool lacks a block that was put")
