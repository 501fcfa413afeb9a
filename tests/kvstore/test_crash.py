"""Messengers and clients, killed and stopped at random moments: no damaged read, no lost block, no lost page.

A round lets some clients work, kills or stops something, lets them work again, and counts everything while
they pause. To repeat round N of seed S: `Crashes(folder, S).play(range(N, N + 1))`; the choices are the same,
the moments nearly so.
"""

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvstore.client.client import KVCachePool
from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT
from mooncake.config.sections import KVCacheConfig
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolStats, Tier
from tests.deadline import DEADLINE_S
from tests.forked import Forked
from tests.kvstore import crash_writer
from tests.kvstore.crash_writer import FINGERPRINT, LAYOUT, Lines, block_of, insist
from tests.kvstore.nodes import Node, unused
from tests.kvstore.pools import connected

pytestmark = pytest.mark.cluster

NUM_CLIENTS = 3
NUM_PAGES = 24
NUM_SLOTS = 300
"""of each of two disks: enough that no block is ever evicted from them"""
MOST_LINES = 150
"""acknowledged between two crashes"""
LONGEST_DELAY_S = 0.005
POLL_S = 0.05
KEY = bytes(16)


def space_for(num_pages: int) -> int:
    """Bytes of a segment or slab."""
    return 3 * ALIGNMENT + num_pages * (LAYOUT.block_bytes + record_bytes(LAYOUT.num_layers))


class Client:
    """A writer process, and what it has told of its blocks."""

    def __init__(self, socket_path: str, seed: str, stored: Sequence[BlockKey]) -> None:
        stdin, commands = os.pipe()
        lines, stdout = os.pipe()
        self.process = Forked(
            crash_writer.run,
            socket_path,
            seed,
            stdin=stdin,
            stdout=stdout,
            stderr=2,
            environ=dict(os.environ),
        )
        os.close(stdin)
        os.close(stdout)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._lines = os.fdopen(lines, "rb")
        self.lines = Lines(lines)
        self.stored = set(stored)
        self.removed: set[BlockKey] = set()
        self.unsettled: set[BlockKey] = set()
        """being stored or removed"""
        self.num_lines = 0
        self.is_paused = True
        self.faults: list[str] = []
        self.command(f"own {' '.join(key.hex() for key in stored)}")
        self.command("go")

    def command(self, line: str) -> None:
        self.is_paused = False
        with contextlib.suppress(BrokenPipeError):  # who has ended by itself is noticed by `listen`
            self._commands.write(f"{line}\n".encode())

    def listen(self) -> None:
        """Takes in what it has told. Raises EOFError after its end."""
        while self.lines.is_ready(0):
            what, *names = self.lines.read().split()
            self.num_lines += 1
            match what:
                case "put":
                    self.unsettled = set(map(bytes.fromhex, names))
                case "stored":
                    self.stored |= self.unsettled
                    self.unsettled = set()
                case "remove":
                    self.unsettled = set(map(bytes.fromhex, names))
                    self.stored -= self.unsettled
                case "removed":
                    self.removed |= self.unsettled
                    self.unsettled = set()
                case "paused":
                    self.is_paused = True
                case "fault":
                    self.faults.append(" ".join(names))

    @property
    def is_stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(EOFError):
            self.listen()

    def close(self) -> None:
        self.process.close()
        self._commands.close()
        self._lines.close()


class Crashes:
    """A node, its clients, and what they must find. A context manager."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.place = "at the start"
        self.unsettled: set[BlockKey] = set()
        """whose owner died while it stored or removed them"""
        self.removed: set[BlockKey] = set()
        self.num_moves = 0
        """at least so many blocks went to SSD and back"""
        self.num_clients_started = 0
        for disk in ("disk-0", "disk-1"):
            (folder / disk).mkdir()
        self.node = self.start_node()
        self.pool = client_of(self.node)
        self.clients = [self.start_client([]) for _ in range(NUM_CLIENTS)]

    def play(self, rounds: range) -> None:
        actions = (
            self.kill_messenger,
            self.stop_client,
            self.kill_client,
            self.lose_memory,
            self.stop_and_kill_client,
            self.kill_both,
        )
        for number in rounds:
            action = actions[number % len(actions)]
            self.place = f"seed {self.seed}, round {number} ({action.__name__})"
            choices = random.Random(f"{self.seed}/{number}")
            self.work(choices)
            action(choices)
            self.work(choices)
            self.check()

    # -- what happens -----------------------------------------------------------------------------

    def kill_messenger(self, choices: random.Random) -> None:
        self.node.kill()
        self.node.start()

    def kill_client(self, choices: random.Random) -> None:
        victim = choices.choice(self.clients)
        victim.kill()
        self.replace(victim)

    def kill_both(self, choices: random.Random) -> None:
        self.node.kill()
        self.kill_client(choices)
        self.node.start()

    def stop_client(self, choices: random.Random) -> None:
        """Its late writes reach nobody's blocks."""
        self.stop(choices).process.send_signal(signal.SIGCONT)

    def stop_and_kill_client(self, choices: random.Random) -> None:
        victim = self.stop(choices)
        victim.kill()
        self.replace(victim)

    def stop(self, choices: random.Random) -> Client:
        """Stops a client in the middle of a copy. Its pages are nobody else's, whoever works meanwhile."""
        victim = choices.choice(self.clients)
        victim.command("stop")
        self.listen(lambda: victim.is_stopped)
        for _ in range(choices.randint(1, 2)):
            self.kill_messenger(choices)
            self.work(choices, stopped=victim)
            self.require(self.stats().num_quarantined > 0, "the pages of a live writer were given away")
        return victim

    def lose_memory(self, choices: random.Random) -> None:
        """The whole node dies. What was on SSD before, and was not removed, is there afterwards."""
        on_ssd = {info.key for _, info in self.pool.list_blocks() if info.tier is Tier.SSD}
        self.work(choices)
        for client in self.clients:
            client.process.kill()
        self.node.close()
        for client in self.clients:
            client.kill()
        self.node = self.start_node()
        self.pool.close()
        self.pool = client_of(self.node)
        for client in self.clients:
            found = self.found(list(client.stored))
            self.require(client.stored & on_ssd <= found, "blocks that were on SSD are lost")
            client.stored = found
        for client in list(self.clients):
            self.replace(client)

    def work(self, choices: random.Random, stopped: Client | None = None) -> None:
        """Clients but `stopped` get some things done, and perhaps begin the next."""
        workers = [client for client in self.clients if client is not stopped]
        enough = sum(client.num_lines for client in workers) + choices.randint(1, MOST_LINES)
        self.listen(lambda: sum(client.num_lines for client in workers) >= enough)
        insist(self.pool.stats)  # they may have told all that before the messenger was killed
        end_s = time.monotonic() + choices.uniform(0, LONGEST_DELAY_S)
        self.listen(lambda: time.monotonic() >= end_s)

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """With all clients at rest: every block, every page."""
        for client in self.clients:
            client.command("pause")
        self.listen(lambda: all(client.is_paused for client in self.clients))
        self.pool.remove(list(self.unsettled))
        self.removed |= self.unsettled
        self.unsettled.clear()
        stored = [key for client in self.clients for key in client.stored]
        found = self.found(stored)
        self.require(
            len(found) == len(stored), f"{len(stored) - len(found)} of {len(stored)} blocks are lost"
        )
        removed = self.removed.union(*(client.removed for client in self.clients))
        self.require(not self.found(list(removed)), "removed blocks are there")
        for start in range(0, len(stored), NUM_PAGES):
            keys = stored[start : start + NUM_PAGES]
            buffers = [bytearray(LAYOUT.block_bytes) for _ in keys]
            self.require(all(self.pool.get(keys, buffers)), "a block that is there cannot be read")
            self.require(buffers == [block_of(key) for key in keys], "a block has other bytes")
        self.check_pages()
        for client in self.clients:
            client.command("go")

    def check_pages(self) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not unused(stats := self.stats()) or stats.num_leases or stats.num_orphaned:
            self.require(time.monotonic() < deadline_s, f"pages are still in use: {stats}")
        self.num_moves += min(stats.num_demotions, stats.num_promotions)
        ssd = stats.tiers[Tier.SSD]
        self.require(ssd.num_evictions == 0, "the disks are too small for this test")
        self.require(ssd.is_healthy and ssd.num_errors == 0, "a disk has failed")
        num_damaged = stats.num_dropped + ssd.num_checksum_failures
        self.require(num_damaged == 0, f"{num_damaged} blocks were damaged")

    def found(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        return {key for key, tier in zip(keys, self.pool.exists(keys), strict=True) if tier is not None}

    def stats(self) -> PoolStats:
        (stats,) = self.pool.stats(check_integrity=True).values()
        self.require(stats.integrity is None, f"{stats.integrity}")
        return stats

    def require(self, condition: bool, what: str) -> None:
        assert condition, f"{self.place}: {what}"

    # -- processes --------------------------------------------------------------------------------

    def listen(self, is_done: Callable[[], bool]) -> None:
        """Takes in what clients tell until `is_done`."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            select.select([client.lines for client in self.clients], [], [], POLL_S)
            for client in self.clients:
                try:
                    client.listen()
                except EOFError:
                    self.require(False, "a client has ended by itself")
                self.require(not client.faults, "; ".join(client.faults))
            assert self.node.process is not None
            self.require(self.node.process.poll() is None, "the messenger has ended by itself")
            self.require(time.monotonic() < deadline_s, "the clients get nothing done")

    def start_node(self) -> Node:
        """A messenger on new memory, and on the disks as they are."""
        node = Node(self.folder, "node", space_for(NUM_PAGES), "auto")
        node.kvcache = KVCacheConfig(
            low_watermark=0.1,
            high_watermark=0.2,
            ssd_dirs=[self.folder / "disk-0", self.folder / "disk-1"],
            ssd_bytes=ByteSize(space_for(NUM_SLOTS)),
            ssd_timeout_s=4,  # the longest: a slow disk would excuse a block that is not found
        )
        node.start()
        return node

    def start_client(self, stored: Sequence[BlockKey]) -> Client:
        self.num_clients_started += 1
        return Client(self.node.socket_path, f"{self.seed}/{self.num_clients_started}", stored)

    def replace(self, victim: Client) -> None:
        """The blocks of a dead client get another owner."""
        victim.close()
        self.unsettled |= victim.unsettled
        self.removed |= victim.removed
        self.clients[self.clients.index(victim)] = self.start_client(sorted(victim.stored))

    def __enter__(self) -> "Crashes":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        for client in self.clients:
            client.close()
        self.node.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with contextlib.closing(Node(tmp_path, "node", space_for(NUM_PAGES), "auto")) as node:
        node.start()
        yield node


def client_of(node: Node) -> KVCachePool:
    return connected(f"unix:{node.socket_path}", fingerprint=FINGERPRINT, layout=LAYOUT)


def test_what_a_reader_kept_is_free_after_a_crash(node: Node) -> None:
    """Who wrote it still lives, but has nothing to do with it any more."""
    with client_of(node) as writer:
        writer.put([KEY], [block_of(KEY)])
    with client_of(node) as reader, reader.lease([KEY]):
        reader.remove([KEY])
        node.kill()
        node.start()
        with client_of(node) as other:
            (stats,) = other.stats(check_integrity=True).values()
    assert stats.num_free == NUM_PAGES


def test_lease_of_a_dead_messenger_notices_that_its_block_went_and_came_back(node: Node) -> None:
    """To the same page; what was read in between may have been another block."""
    with client_of(node) as reader, client_of(node) as writer:
        writer.put([KEY], [block_of(KEY)])
        lease = reader.lease([KEY])
        assert lease.verify() == [True]
        node.kill()
        node.start()
        with client_of(node) as other:
            other.remove([KEY])
            other.put([KEY], [block_of(KEY)])
        assert lease.verify() == [False]
        lease.end()


@pytest.mark.parametrize(
    ("seed", "num_rounds"),
    [(1, 6), pytest.param(2, 200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=["each", "soak"],
)
def test_crashes_lose_and_damage_nothing(tmp_path: Path, seed: int, num_rounds: int) -> None:
    with Crashes(tmp_path, seed) as crashes:
        crashes.play(range(num_rounds))
        assert crashes.num_moves > 0, "nothing went from tier to tier"
