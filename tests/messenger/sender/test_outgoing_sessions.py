"""Sessions with many messengers, of which some are given up."""

from pathlib import Path

from messenger.sender.outgoing_session import OutgoingSession
from tests.messenger.fabric import Fabric, fabric, until


async def session(node: Fabric, name: str) -> OutgoingSession:
    """One of several messengers, all of which are the receiver."""
    return await node.peers.peer(node.address_with(event_endpoints=(name, "")))


async def test_an_idle_session_makes_room_for_a_new_one(tmp_path: Path) -> None:
    async with fabric(tmp_path, max_sessions=2) as node:
        first, second = await session(node, "first"), await session(node, "second")
        assert await session(node, "first") is first
        third = await session(node, "third")
        await until(lambda: second.closed_reason is not None)
        assert set(node.peers.all) == {first, third}
        await until(lambda: node.num_served == 2)


async def test_a_session_with_a_transfer_is_kept_even_if_it_is_one_too_many(tmp_path: Path) -> None:
    async with fabric(tmp_path, max_sessions=2) as node:
        node.pages.grant(1, [0])
        first, second = await session(node, "first"), await session(node, "second")
        with first.transfer(1, "a test", lambda: None), second.transfer(1, "a test", lambda: None):
            third = await session(node, "third")
            assert set(node.peers.all) == {first, second, third}
        await session(node, "fourth")
        await until(lambda: len(node.peers.all) == 2)
