"""A client that stores, reads, leases and removes blocks at random. Tests kill or stop it at any moment.

A block's bytes follow from its key, so every reader can check them. Each line on stdout names an action that
begins or that was acknowledged, before the next action begins; `fault ...` reports a violated invariant.
Commands on stdin: `own KEY...` (blocks of a predecessor), `go`, `pause`, and `stop`: to stop this process in
the middle of the next block that it writes.
"""

import os
import random
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvstore.client import mapped
from kvstore.client.client import KVCachePool
from kvstore.client.leases import Lease
from messenger.wire import checksums
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey, KVLayout
from tests.forked import preload

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=32, dtype="bfloat16")
FINGERPRINT = "c" * 32
MOST_OWNED = 90
MOST_AT_ONCE = 4
MOST_LEASED = 2
PATIENCE_S = 30.0
"""Seconds for which a call is repeated while the messenger is being restarted."""
Answer = TypeVar("Answer")
preload("tests.kvstore.crash_writer")


def block_of(key: BlockKey) -> bytes:
    """Return the bytes that are stored under `key`."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(LAYOUT.block_bytes)


def names(keys: Sequence[BlockKey]) -> str:
    return " ".join(key.hex() for key in keys)


class CrashWriter:
    """The client. `owned` are the keys that it has stored and that no other client removes."""

    def __init__(self, socket_path: str, seed: str) -> None:
        self.random = random.Random(seed)
        self.owned: list[BlockKey] = []
        self.lease: tuple[Lease, Sequence[BlockKey]] | None = None
        self.stops_in_next_put = False
        self.pool = insist(
            lambda: KVCachePool.connect(f"unix:{socket_path}", fingerprint=FINGERPRINT, layout=LAYOUT)
        )

    def run(self) -> None:
        steps = (self.put, self.put, self.read_own, self.read_own, self.read_any, self.hold, self.prefetch)
        commands, is_paused = Lines(0), True
        while True:
            while is_paused or commands.is_ready(0):
                command, *keys = commands.read().split()
                match command:
                    case "own":
                        self.owned += map(bytes.fromhex, keys)
                    case "stop":
                        self.stops_in_next_put = True
                    case "pause":
                        self.end_lease()
                        tell("paused")
                        is_paused = True
                    case "go":
                        is_paused = False
            self.random.choice(steps)()
            if len(self.owned) > MOST_OWNED:
                self.remove()

    # -- what it does -----------------------------------------------------------------------------

    def put(self) -> None:
        keys = [self.random.randbytes(16) for _ in range(self.random.randint(1, MOST_AT_ONCE))]
        blocks = [block_of(key) for key in keys]
        if self.stops_in_next_put:
            self.stops_in_next_put = False
            mapped.copy_layers = copy_and_stop
        tell(f"put {names(keys)}")
        insist(lambda: self.pool.put(keys, blocks))
        tell(f"stored {names(keys)}")
        self.owned += keys

    def remove(self) -> None:
        self.random.shuffle(self.owned)
        keys = [self.owned.pop() for _ in range(MOST_AT_ONCE)]
        tell(f"remove {names(keys)}")
        insist(lambda: self.pool.remove(keys))
        tell(f"removed {names(keys)}")

    def read_own(self) -> None:
        keys = self.some_own(MOST_AT_ONCE)
        missing = [key for key, is_there in zip(keys, self.read(keys), strict=True) if not is_there]
        if missing:
            tell(f"fault lost {names(missing)}")

    def read_any(self) -> None:
        """Read blocks of any client. Other clients may remove them meanwhile."""
        everything = insist(lambda: [info.key for _, info in self.pool.list_blocks()])
        if everything:
            self.read(self.random.choices(everything, k=MOST_AT_ONCE))

    def read(self, keys: Sequence[BlockKey]) -> list[bool]:
        buffers = [bytearray(LAYOUT.block_bytes) for _ in keys]
        is_there = insist(lambda: self.pool.get(keys, buffers))
        for key, buffer, found in zip(keys, buffers, is_there, strict=True):
            if found and buffer != block_of(key):
                tell(f"fault read other bytes under {key.hex()}")
        tell("read")
        return is_there

    def hold(self) -> None:
        """Keep a lease while other actions run.

        If the messenger is killed meanwhile, `verify` must notice it.
        """
        if self.lease is None:
            keys = self.some_own(MOST_LEASED)
            self.lease = (insist(lambda: self.pool.lease(keys)), keys)
            return
        lease, keys = self.lease
        is_same = [
            block is None or block == block_of(key) for key, block in zip(keys, lease.blocks, strict=True)
        ]
        if any(intact and not same for intact, same in zip(lease.verify(), is_same, strict=True)):
            tell(f"fault a lease on {names(keys)} let their bytes change")
        self.end_lease()

    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease[0].end()
            self.lease = None

    def prefetch(self) -> None:
        keys = self.some_own(MOST_AT_ONCE)
        insist(lambda: self.pool.prefetch(keys))

    def some_own(self, most: int) -> list[BlockKey]:
        return self.random.sample(self.owned, min(len(self.owned), most))


def insist(act: Callable[[], Answer]) -> Answer:
    """Call `act` again and again until the messenger answers."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except PoolError as error:
            if "no pool answers" not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.01)


def copy_and_stop(source: memoryview, target: memoryview, layer_bytes: int) -> bytes:
    """Copy layers as `checksums.copy_layers` does, and stop this process in the middle, once.

    When the process is continued, the rest is written late.
    """
    mapped.copy_layers = checksums.copy_layers
    half = len(target) // 2
    target[:half] = source[:half]
    os.kill(os.getpid(), signal.SIGSTOP)
    return checksums.copy_layers(source, target, layer_bytes)


class Lines:
    """An iterator over the lines from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def is_ready(self, timeout_s: float) -> bool:
        return b"\n" in self._rest or bool(select.select([self._fd], [], [], timeout_s)[0])

    def read(self) -> str:
        """Return the next line. Raises EOFError."""
        while b"\n" not in self._rest:
            data = os.read(self._fd, 1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def run(socket_path: str, seed: str) -> None:
    """Be such a client of the messenger at this socket, for a process of its own."""
    CrashWriter(socket_path, seed).run()
