"""Writes into memory that two messengers of one host share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from messenger.sender.requests import Urgency, WriteOutcome
from messenger.shm import copy_table
from messenger.shm.shared_pages import SharedPages
from messenger.transport.transports import Transport
from messenger.wire.messages import Abandon, Write
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import LARGE, TINY, fabric, until


@pytest.mark.parametrize("layout", [LARGE, TINY])
async def test_where_a_sender_cannot_write_itself_the_receiver_copies(
    tmp_path: Path, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no compiler, or the layers are too short for what it compiles."""

    if layout is LARGE:
        monkeypatch.setattr(copy_table, "native", lambda: None)
    async with fabric(tmp_path, layout, 4, transport="shm") as node:
        node.pages.grant(1, [0, 1])
        await node.write(1, [0, 1])
        node.assert_written([0, 1])
        assert node.sent.sent_bytes[Transport.SHM] == 2 * layout.block_bytes


async def test_what_is_written_over_shared_memory_is_there_before_the_receiver_knows(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4, transport="shm") as node:
        grant = node.pages.grant(1, [0])
        peer = await node.peer()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "quick", lambda: None) as transfer:
            writing = transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            with pytest.raises(StopIteration):
                writing.send(None)
            assert outcomes == [WriteOutcome.PLACED]
            node.assert_written([0])
            assert not grant.is_complete
            assert not transfer.is_acknowledged
            await until(lambda: transfer.is_acknowledged)
            assert grant.is_complete


async def test_of_bulk_that_was_placed_the_receiver_hears_with_what_somebody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messenger.sender.send_queue.NOT_URGENT_S", 3600.0)
    async with fabric(tmp_path, LARGE, 16, transport="shm", streams=1) as node:
        grant, outcomes = node.pages.grant(1, range(8)), list[WriteOutcome]()
        node.pages.grant(2, [8])
        peer = await node.peer()
        with peer.transfer(1, "bulk", lambda: None, Urgency.BULK) as bulk:
            for page in range(8):
                await bulk.write([node.entry(page)], LARGE.block_bytes, outcomes.append)
            await until(lambda: len(outcomes) == 8)
            assert not grant.arrived
            await node.write(2, [8])
            await until(lambda: bulk.is_acknowledged)
        assert grant.is_complete
        node.assert_written(range(9))


@pytest.mark.parametrize("num_slots", [2, 1])
async def test_what_the_receiver_was_not_told_is_said_again_on_another_lane(
    tmp_path: Path, num_slots: int
) -> None:
    """Also on one that found no slot."""
    async with fabric(tmp_path, LARGE, 4, transport="shm", streams=2) as node:
        slots = node.receiver_memory.copy_table
        take_slot = slots.take_slot
        slots.take_slot = lambda pid: take_slot(pid) if len(node.slots_taken) < num_slots else None  # type: ignore[method-assign]
        grant = node.pages.grant(1, [0, 1])
        peer = await node.peer(2)
        with_slot = sorted(peer.lanes, key=lambda lane: lane._outlet.pages is None)
        assert [lane._outlet.pages is not None for lane in with_slot] == [True, num_slots == 2]
        peer._queues.set_lanes(with_slot)  # the first one takes it
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "told twice", lambda: None) as transfer:
            for lane in peer.lanes:  # what they say is lost with them
                lane._send_queue._outbox.post = lambda *_: None  # type: ignore[method-assign]
                if lane._outlet.pages is not None:
                    sends(lane._outlet.pages, lambda fd, word: len(word))
            await transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            node.sender_memory.page(0)[:8] = bytes(8)  # nobody reads it any more
            lane = next(lane for lane in peer.lanes if lane.num_outstanding)
            other = next(each for each in peer.lanes if each is not lane)
            del other._send_queue._outbox.post
            lane.give_up("a test")
            await until(lambda: transfer.is_acknowledged)
            assert outcomes == [WriteOutcome.PLACED]
            assert [page for page, _ in grant.arrived] == [0] * node.layout.num_layers


def sends(shared: SharedPages, send: Callable[[int, bytes], int]) -> None:
    """What is said when bytes are in their pages goes there."""
    place = shared.place

    def place_and_send(write: Write, layer_bytes: int, fd: int, word: bytes) -> int | None:
        return None if place(write, layer_bytes) is None else send(fd, word)

    shared.place = place_and_send  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("num_bytes", [0, 1, 30])
async def test_what_did_not_leave_with_the_bytes_that_it_is_about_follows(
    tmp_path: Path, num_bytes: int
) -> None:
    def send(fd: int, word: bytes) -> int:
        assert len(word) > 30
        return os.write(fd, word[:num_bytes]) if num_bytes else 0

    async with fabric(tmp_path, LARGE, 4, transport="shm", streams=1) as node:
        peer = await node.peer()
        (lane,) = peer.lanes
        assert lane._outlet.pages is not None
        sends(lane._outlet.pages, send)
        for page in range(3):  # with each the end of the one before
            grant = node.pages.grant(page, [page])
            await node.write(page, [page])
            assert grant.is_complete
        await until(lambda: not any(grant.writers for grant in node.pages.grants.values()))
        grant = node.pages.grant(3, [3])
        with peer.transfer(3, "said at once", lambda: None) as transfer:
            entry, word = node.entry(3), Abandon(99)
            await transfer.write([entry], LARGE.block_bytes, lambda _: lane.post(word, may_wait=True))
            await until(lambda: transfer.is_acknowledged)
        assert grant.is_complete


async def test_a_placed_write_that_is_refused_fails_its_transfer(tmp_path: Path) -> None:
    async with fabric(tmp_path, transport="shm") as node:
        grant = node.pages.grant(1, [0])
        peer = await node.peer()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "revoked", lambda: None) as transfer:
            await transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            grant.failure = "revoked"
            await until(lambda: transfer.failure is not None)
            assert transfer.failure == "receiver refused a write: grant 1 is unknown here"
        assert outcomes == [WriteOutcome.PLACED]
        node.pages.revoke(1, "revoked")
        await node.assert_works()
