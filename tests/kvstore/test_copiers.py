"""Pages that others of this host write to themselves: when they are free again, in this life and the next."""

import asyncio
import contextlib
import itertools
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstore.events.batches import EventLog
from kvstore.pool.pages import PageState, PageWriter
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.server.store import Store, open_store
from kvstore.transfer.grants import Grants
from messenger.rdma.cards import Cards
from messenger.receiver.served_pool import SharedSegment
from messenger.shm.shared_pages import SharedPages
from messenger.transport.transports import Traffic
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import Write, WriteEntry
from mooncake.config.sections import KVCacheConfig, MessengerConfig, SecurityConfig
from mooncake.messages.pools import MessengerAddress
from mooncake.node.process_config import MessengerProcess
from tests.kvstore.nodes import CLUSTER_KEY, FINGERPRINT, LAYOUT, block_bytes, prompt_keys
from tests.messenger.fabric import until

ADDRESS = MessengerAddress("decode", 1, "host", "decode.sock", ())
OWNER = 1


class Node:
    """The parts of a messenger that know whose pages are whose."""

    def __init__(self, fd: int) -> None:
        self.segment = Segment.open(fd) or Segment.format(fd, FINGERPRINT, LAYOUT)
        shared_segment = self.segment.shared_segment(fd)
        assert shared_segment is not None
        self.shared_segment: SharedSegment = shared_segment
        self.pool = Pool(self.segment.page_table())
        self.grants = Grants(self.pool, self.segment, ADDRESS, shared_segment.copy_table)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("copied")
    os.truncate(fd, 65536)
    yield fd
    os.close(fd)


@pytest.fixture
def copier() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("ending", ["copy", "process"])
async def test_a_revoked_page_is_quarantined_until_the_copy_to_it_has_ended(
    fd: int, copier: subprocess.Popen[bytes], ending: str
) -> None:
    node = Node(fd)
    pool, (key,) = node.pool, prompt_keys(1)
    reservation = pool.reserve(OWNER, [key], 0)
    grant = node.grants.grant(reservation)
    (page,) = (granted.page for granted in grant.pages)
    slot = node.shared_segment.take_slot(copier.pid)
    assert slot is not None
    words = node.segment.buffer[slot.copy_table_offset :][:2048].cast("Q")
    words[2 * slot.number] = grant.grant_id + 1  # as it says itself
    node.grants.revoke(reservation.reservation_id, "released")
    pool.release(reservation.reservation_id)
    assert pool.table.state(page) is PageState.QUARANTINED
    assert pool.check_integrity() is None
    if ending == "copy":
        words[2 * slot.number] = 0
    else:
        copier.kill()
    await until(lambda: pool.table.state(page) is PageState.FREE)
    assert pool.check_integrity() is None


@pytest.mark.parametrize("ending", ["copy", "process"])
async def test_pages_of_an_earlier_life_are_free_when_the_copy_to_them_has_ended(
    fd: int, copier: subprocess.Popen[bytes], tmp_path: Path, ending: str
) -> None:
    former, keys = Node(fd), prompt_keys(2)
    slot = former.shared_segment.take_slot(copier.pid)
    assert slot is not None
    grant = former.grants.grant(former.pool.reserve(OWNER, keys[:1], 0))
    former.pool.reserve(OWNER, keys[1:], 0, PageWriter(os.getpid(), 0))  # its worker lives on
    words = former.segment.buffer[slot.copy_table_offset :][:2048].cast("Q")
    words[2 * slot.number] = grant.grant_id + 1

    async with store_over(fd, tmp_path) as store:
        table, (granted,) = store.pool.table, grant.pages
        await asyncio.sleep(0)  # it begins to look after them
        assert table.state(granted.page) is PageState.QUARANTINED
        if ending == "copy":
            words[2 * slot.number] = 0
        else:
            copier.kill()
        await until(lambda: table.state(granted.page) is PageState.FREE)
        assert store.pool.holds.former_writers == [PageWriter(os.getpid(), 0)]
        assert table.count()[PageState.QUARANTINED] == 1
        assert store.pool.check_integrity() is None


@contextlib.asynccontextmanager
async def store_over(fd: int, folder: Path) -> AsyncIterator[Store]:
    """What the messenger's next life makes of the segment."""
    config = MessengerProcess(
        cluster_key=CLUSTER_KEY,
        settings=MessengerConfig(),
        kvcache=KVCacheConfig(),
        security=SecurityConfig(),
        instance="decode",
        incarnation=2,
        worker_socket=str(folder / "decode.sock"),
        peer_socket=str(folder / "decode-peer.sock"),
        event_endpoints=("", ""),
        segment_fd=fd,
    )
    segment = Segment.open(fd)
    assert segment is not None
    async with asyncio.TaskGroup() as tasks:
        store = open_store(config, segment, ADDRESS, Traffic(), EventLog(1), None, Cards([]), tasks)
        try:
            yield store
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            os.close(store.peers._source.read_only_fd)


async def test_a_grant_is_open_to_be_written_until_it_is_complete(fd: int) -> None:
    node = Node(fd)
    (key,) = prompt_keys(1)
    reservation = node.pool.reserve(OWNER, [key], 0)
    grant = node.grants.grant(reservation)
    (granted,) = grant.pages
    slot = node.shared_segment.take_slot(os.getpid())
    assert slot is not None
    source = memoryview(bytearray(b"".join(block_bytes(key, layer) for layer in range(LAYOUT.num_layers))))
    pages = SharedPages(node.segment.buffer, slot, LAYOUT, source)
    for layer in range(LAYOUT.num_layers):
        begin = layer * LAYOUT.layer_bytes
        data = source[begin : begin + LAYOUT.layer_bytes]
        checksum = layer_checksums(data, LAYOUT.layer_bytes)
        entry = WriteEntry(granted.page, granted.generation, layer, layer + 1, checksum, begin)
        write = Write(1, grant.grant_id, [entry])
        assert pages.place(write, LAYOUT.layer_bytes) == 0
        assert node.segment.layer_view(granted.page, layer) == data
        assert node.grants.begin(grant.grant_id, entry, None) is not None
        is_last = node.grants.complete(grant.grant_id, entry, None)
        assert is_last == (layer == LAYOUT.num_layers - 1)
    assert node.pool.find(key) == granted.page
    assert pages.place(write, LAYOUT.layer_bytes) is None


async def test_a_grant_without_an_entry_in_the_table_is_left_to_the_receiver(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(fd)
    keys = prompt_keys(3)
    ids = itertools.count(128, 128)  # all of one entry
    monkeypatch.setattr(secrets, "randbits", lambda _num_bits: next(ids))
    grants = [node.grants.grant(node.pool.reserve(OWNER, [key], 0)) for key in keys]
    assert node.grants.num_unlisted == 2
    assert caplog.text.count("no entry in the copy table") == 2
    (granted,) = grants[1].pages
    slot = node.shared_segment.take_slot(os.getpid())
    assert slot is not None
    data = memoryview(bytearray(block_bytes(keys[1], 0)))
    checksum = layer_checksums(data, LAYOUT.layer_bytes)
    entry = WriteEntry(granted.page, granted.generation, 0, 1, checksum, 0)
    pages = SharedPages(node.segment.buffer, slot, LAYOUT, data)
    assert pages.place(Write(1, grants[1].grant_id, [entry]), LAYOUT.layer_bytes) is None
    assert node.grants.begin(grants[1].grant_id, entry, None) is not None
