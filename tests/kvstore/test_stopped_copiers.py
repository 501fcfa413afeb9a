"""A messenger is stopped while it writes to another one's segment; then it goes on, or one of both is killed.

Whatever happens, no reader finds other bytes, no page is lost, every transfer ends. The choices follow from
the seed, the moments nearly so.
"""

import asyncio
import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.client.worker_client import WorkerClient
from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT
from kvstore.protocol.answers import Reservation
from messenger.shm.copy_table import COPY_TABLE_BYTES, NUM_COPY_SLOTS
from mooncake.errors import MooncakeError
from mooncake.messages.blocks import BlockKey
from tests.kvstore.nodes import DEADLINE_S, ROOT, Node, until, unused
from tests.kvstore.segment_reader import LAYOUT, block_of, key_of

NUM_ROUNDS = 100
NUM_PAGES = 14
NUM_KEYS = 40
NUM_BLOCKS = 6
"""of one transfer"""
LAYERS = range(LAYOUT.num_layers)
MOST_ROUNDS = 10
"""in the life of a reader"""
ARRIVAL_S = 0.5
CATCH_S = 0.2
"""for a copy to begin"""
SEGMENT_BYTES = 3 * ALIGNMENT + NUM_PAGES * (LAYOUT.block_bytes + record_bytes(LAYOUT.num_layers))
ENDINGS = ("goes on", "goes on late", "is killed", "loses the owner")


class Slots:
    """What the copy_table of a segment says."""

    def __init__(self, segment_fd: int) -> None:
        words = np.frombuffer(mmap.mmap(segment_fd, ALIGNMENT), np.uint64)[-COPY_TABLE_BYTES // 8 :]
        self._copied = words[0 : 2 * NUM_COPY_SLOTS : 2]

    @property
    def are_busy(self) -> bool:
        """Whether somebody is copying."""
        return bool(self._copied.any())


class Reader:
    """A process that reads the blocks of a segment all the time."""

    def __init__(self, segment_fd: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvstore.segment_reader", str(segment_fd), str(NUM_KEYS)],
            stdout=subprocess.PIPE,
            pass_fds=[segment_fd],
            cwd=ROOT,
        )

    def end(self) -> int:
        """Killed at whatever moment. How many blocks it has read, all of them right."""
        self._process.kill()
        num_there = 0
        for line in self._process.communicate()[0].splitlines():
            num_there, num_wrong = map(int, line.split())
            assert num_wrong == 0
        return num_there

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Stops:
    """A sender, an owner, their workers, and what happens to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.sender, self.owner = (Node(folder, name, SEGMENT_BYTES, "shm") for name in ("sender", "owner"))
        self.slots = Slots(self.owner.segment_fd)
        self.num_caught = self.num_read = 0

    async def play(self, num_rounds: int) -> None:
        self.prefill, self.decode = [await self._begin(node) for node in (self.sender, self.owner)]
        num_left = num_rounds
        while num_left:
            num_now = min(num_left, self.random.randint(1, MOST_ROUNDS))
            with contextlib.closing(Reader(self.owner.segment_fd)) as reader:
                for _ in range(num_now):
                    await self._play_one(self.random.choice(ENDINGS))
                self.num_read += reader.end()
            num_left -= num_now
        for client in (self.prefill, self.decode):
            await client.close()

    async def _play_one(self, ending: str) -> None:
        try:
            async with asyncio.timeout(3 * DEADLINE_S):
                await self._round(ending)
        except BaseException as error:
            error.add_note(f"in a round in which the sender {ending}")
            raise

    async def _round(self, ending: str) -> None:
        keys = self._some_keys()
        to = await self.decode.reserve(keys, 0)
        grant = await self.decode.grant(to.reservation_id)
        source = await self.prefill.reserve(keys, 0)
        await store(self.prefill, keys, source)
        arriving = asyncio.create_task(self.decode.wait_arrived(to.reservation_id))
        catching = asyncio.create_task(asyncio.to_thread(self._stop_in_mid_copy))
        await self.prefill.send(source.reservation_id, grant, ending)
        sending = asyncio.create_task(self.prefill.wait_sent(source.reservation_id))
        is_caught = await catching
        self.num_caught += is_caught
        match ending:
            case "goes on":
                self._go_on()
                await sending
                await arriving
                assert_hold(self.decode, keys, to, all_of_them=True)
                await self.decode.release(to.reservation_id)
            case "goes on late":  # its pages are wanted for something else meanwhile
                await self.decode.release(to.reservation_id)
                await asyncio.wait({arriving})
                await self._write_others()
                self._go_on()
                await asyncio.gather(sending, arriving, return_exceptions=True)
            case "is killed":
                self.sender.kill()
                await asyncio.wait({sending})
                # Who has not said yet what it writes to is missed by nobody: whoever waits has a deadline.
                await asyncio.wait({arriving}, timeout=ARRIVAL_S)
                await self.decode.release(to.reservation_id)
                await asyncio.wait({arriving})
                self.prefill = await self._again(self.sender, self.prefill)
            case _:
                self.owner.kill()
                self.decode = await self._again(self.owner, self.decode)
                stats = await self.decode.stats(check_integrity=True)
                assert stats.integrity is None
                assert not is_caught or stats.num_quarantined
                await self._write_others()
                self._go_on()
                await asyncio.gather(sending, arriving, return_exceptions=True)
        for task in (sending, arriving):
            assert isinstance(task.exception(), MooncakeError | None)
        await self.prefill.release(source.reservation_id)
        for client in (self.prefill, self.decode):
            await until(client, unused)
        await self._look_at(self._some_keys())

    def _some_keys(self) -> list[BlockKey]:
        return [key_of(number) for number in self.random.sample(range(NUM_KEYS), NUM_BLOCKS)]

    def _stop_in_mid_copy(self) -> bool:
        """Whether the sender is; in a thread."""
        assert self.sender.process is not None
        pid, until_s = self.sender.process.pid, time.monotonic() + CATCH_S
        while not self.slots.are_busy and time.monotonic() < until_s:
            time.sleep(0)  # others run
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0)
        return self.slots.are_busy

    def _go_on(self) -> None:
        assert self.sender.process is not None
        self.sender.process.send_signal(signal.SIGCONT)

    async def _look_at(self, keys: Sequence[BlockKey]) -> None:
        """What the owner has of them, and the checksums of all that it has."""
        found = await self.decode.reserve(keys, 0)
        assert_hold(self.decode, keys, found)
        await self.decode.release(found.reservation_id)
        assert await self.decode.verify([key_of(number) for number in range(NUM_KEYS)]) == []

    async def _write_others(self) -> None:
        """The owner takes new pages, and its worker fills them."""
        keys = self._some_keys()
        reservation = await self.decode.reserve(keys, 0)
        await store(self.decode, keys, reservation)
        await self.decode.settled()
        await self.decode.release(reservation.reservation_id)

    async def _begin(self, node: Node) -> WorkerClient:
        node.start()
        return await node.connect(layout=LAYOUT)

    async def _again(self, node: Node, client: WorkerClient) -> WorkerClient:
        await client.close()
        return await self._begin(node)

    def close(self) -> None:
        self.sender.close()
        self.owner.close()


async def store(client: WorkerClient, keys: Sequence[BlockKey], reservation: Reservation) -> None:
    """Writes and commits what is not there."""
    pages, checksums = [], []
    for key, block in zip(keys, reservation.blocks, strict=True):
        if not block.sealed:
            client.segment.page_view(block.page)[:] = block_of(key)
            pages.append(block.page)
            checksums.append(
                [xxhash.xxh3_64_intdigest(client.segment.layer_view(block.page, layer)) for layer in LAYERS]
            )
    await client.commit(reservation.reservation_id, LAYERS, pages, checksums)


def assert_hold(
    client: WorkerClient, keys: Sequence[BlockKey], reservation: Reservation, *, all_of_them: bool = False
) -> None:
    for key, block in zip(keys, reservation.blocks, strict=True):
        if block.sealed or all_of_them:
            assert client.segment.page_view(block.page) == block_of(key)


@pytest.mark.soak
def test_no_byte_is_wrong_and_no_page_lost_however_copiers_stop(short_tmp_path: Path) -> None:
    with contextlib.closing(Stops(short_tmp_path, seed=1)) as stops:
        asyncio.run(stops.play(NUM_ROUNDS))
        assert stops.num_read
        assert stops.num_caught >= NUM_ROUNDS // 10
