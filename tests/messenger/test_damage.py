"""Bytes that are damaged on their way, or where they lie: nobody takes them for blocks."""

import contextlib
from pathlib import Path

import pytest

from messenger.sender.requests import WriteOutcome
from messenger.transport.transports import Transport
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import LARGE, SMALL, TINY, fabric, until
from tests.messenger.proxy import Plan
from tests.messenger.test_faults import every_fault, sample

PLACES = [
    pytest.param(0, LARGE.block_bytes // 2, id="first"),
    pytest.param(1, 2 * LARGE.block_bytes, id="last"),
]
"""of two pages, and offsets in a stream: behind heads of some hundred bytes the last slice of the other"""
FETCHED = range(8, 14, 2)
"""whose keys differ by more than one bit, as real ones do"""


async def damage_one_byte(folder: Path, plan: Plan, layout: KVLayout) -> None:
    """Whichever it is, of a head or of a block: what arrives is right, or there is an error. Then all works
    again."""
    async with fabric(folder, layout, streams=1, connect_timeout_s=1.0, ack_timeout_s=1.0) as node:
        node.proxy().plans.append(plan)
        node.publish(FETCHED)
        for grant_id in range(2):
            pages = range(4 * grant_id, 4 * grant_id + 4)
            node.pages.grant(grant_id, pages)
            with contextlib.suppress(TransferError):
                await node.write(grant_id, pages)
                node.assert_written(pages)
            with contextlib.suppress(TransferError):
                for index in await node.fetch(FETCHED):
                    page = FETCHED[index]
                    assert node.sender_memory.page(page) == node.receiver_memory.page(page)
        await node.assert_works()
        assert await node.fetch(FETCHED) == list(range(len(FETCHED)))
        await until(lambda: node.pages.num_leases == 0)
        node.proxies[0].close()
        await until(lambda: node.num_served == 0)
        node.pages.violations.clear()  # a damaged head says what no sender would


async def one_byte_is_damaged(folder: Path, layout: KVLayout, *, full: bool) -> None:
    await every_fault(
        folder,
        1,
        lambda plan: damage_one_byte(folder, plan, layout),
        up="flip_up_at",
        down="flip_down_at",
        full=full,
        layout=layout,
    )


@pytest.mark.timeout(900)
@pytest.mark.cluster
@sample
async def test_one_byte_is_damaged(tmp_path: Path, full: bool) -> None:
    await one_byte_is_damaged(tmp_path, TINY, full=full)


@pytest.mark.cluster
async def test_one_byte_is_damaged_of_layers_that_compiled_code_places(tmp_path: Path) -> None:
    await one_byte_is_damaged(tmp_path, SMALL, full=False)


@pytest.mark.parametrize(("page", "flip_at"), PLACES)
async def test_a_byte_damaged_on_its_way_fails_the_grant(tmp_path: Path, page: int, flip_at: int) -> None:
    async with fabric(tmp_path, LARGE, 6) as node:
        proxy = node.proxy()
        proxy.plans.append(Plan(flip_up_at=flip_at))
        grant = node.pages.grant(1, [0, 1])
        with pytest.raises(TransferError, match=f"checksum of page {page} from sender does not match"):
            await node.write(1, [0, 1])
        assert grant.failure == f"checksum of page {page} from sender does not match its bytes"
        assert {arrived for arrived, _ in grant.arrived} <= {0, 1} - {page}
        assert node.received.num_checksum_failures == 1
        await node.assert_works()
        assert len(proxy.links) == 1


async def test_the_sender_hears_that_its_bytes_were_damaged(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 6) as node:
        node.proxy().plans.append(Plan(flip_up_at=LARGE.block_bytes // 2))
        peer = await node.peer()
        node.pages.grant(1, [0])
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "damaged", lambda: None) as transfer:
            await transfer.write([node.entry(0)], LARGE.block_bytes, outcomes.append)
            await until(lambda: outcomes)
        assert outcomes == [WriteOutcome.CORRUPT]


@pytest.mark.parametrize(("page", "flip_at"), PLACES)
async def test_a_damaged_block_is_not_delivered(tmp_path: Path, page: int, flip_at: int) -> None:
    async with fabric(tmp_path, LARGE, 6) as node:
        node.proxy().plans.append(Plan(flip_down_at=flip_at))
        node.publish([0, 1])
        assert await node.fetch([0, 1]) == [1 - page]
        assert node.sent.num_checksum_failures == 1
        assert await node.fetch([page]) == [0]
        await until(lambda: node.pages.num_leases == 0)


async def test_damage_in_shared_memory_is_noticed_too(tmp_path: Path) -> None:
    async with fabric(tmp_path, transport="shm") as node:
        grant = node.pages.grant(1, [0])
        entry = node.entry(0)
        node.sender_memory.page(0)[5] ^= 1
        peer = await node.peer()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "damaged", lambda: None) as transfer:
            await transfer.write([entry], node.layout.block_bytes, outcomes.append)
            await until(lambda: outcomes)
        assert outcomes == [WriteOutcome.CORRUPT]
        assert grant.failure is not None
        assert node.received.received_bytes[Transport.SHM] == 0
