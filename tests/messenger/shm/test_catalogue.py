"""Blocks of another process's segment, found and read without asking."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from messenger.sender.requests import Urgency
from mooncake.errors import TransferError
from tests.messenger.fabric import LARGE, Fabric, fabric, key, until

SHM = {"transport": "shm", "streams": 1}


def publish(node: Fabric, pages: Sequence[int]) -> None:
    """Fills pages of the receiver, which those of its host find."""
    node.publish(pages)
    for page in pages:
        node.receiver_memory.shelve(key(page), page)


def assert_read(node: Fabric, pages: Sequence[int]) -> None:
    for page in pages:
        assert node.sender_memory.page(page) == node.receiver_memory.page(page)


async def test_what_is_found_is_read_without_asking(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, **SHM) as node:
        publish(node, range(4))
        assert await node.fetch(range(4)) == [0, 1, 2, 3]
        assert_read(node, range(4))
        peer = await node.peer()
        assert all(lane.has_answered for lane in peer.lanes)  # it was of use
        layers, views = range(1, 3), [node.sender_memory.layers(page, range(2)) for page in (9, 8)]
        found = await peer.fetch([key(3), key(0)], views, layers, Urgency.BULK)
        assert found == {
            index: node.receiver_memory.checksums(page, layers) for index, page in enumerate((3, 0))
        }
        assert views[0] == node.receiver_memory.layers(3, layers)
        await until(lambda: node.pages.num_read == 6)
        assert node.pages.num_asked == 0
        num_bytes = 4 * LARGE.block_bytes + 4 * LARGE.layer_bytes
        assert sum(node.received.sent_bytes.values()) == num_bytes
        assert sum(node.sent.received_bytes.values()) == num_bytes
        assert peer.is_idle


@pytest.mark.parametrize("what", ["absent", "damaged", "of another generation", "outside"])
async def test_what_is_not_found_intact_is_asked_for(tmp_path: Path, what: str) -> None:
    async with fabric(tmp_path, LARGE, **SHM) as node:
        publish(node, range(3))
        memory = node.receiver_memory
        match what:
            case "absent":
                node.publish([3])
            case "damaged":  # what it says of its bytes is
                publish(node, [3])
                memory.page(3)[-1] ^= 1
            case "of another generation":
                publish(node, [3])
                memory.unshelve(3)
            case _:
                publish(node, [3])
                memory.shelve(key(77), 3)
        assert await node.fetch(range(4)) == [0, 1, 2, 3]
        assert_read(node, range(4))
        assert node.pages.num_asked == 1


async def test_of_who_has_other_heads_nothing_is_read_without_saying_which(tmp_path: Path) -> None:
    """There may be as many of them."""
    async with fabric(tmp_path, LARGE, **SHM) as node:
        publish(node, [0])
        heads = range(LARGE.num_kv_heads, 2 * LARGE.num_kv_heads)
        peer = await node.peers_with(node.key, layout=LARGE.of_heads(heads)).peer(node.address)
        with pytest.raises(TransferError, match=r"which heads of \[0, 4\) is not said"):
            await peer.fetch([key(0)], [node.sender_memory.page(0)], range(LARGE.num_layers))


async def test_a_holder_that_takes_no_word_any_more_is_given_up(tmp_path: Path) -> None:
    """What is read at once has no answer to be late."""

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async with fabric(tmp_path, LARGE, **SHM, ack_timeout_s=0.2) as node:
        publish(node, range(2))
        (lane,) = (await node.peer()).lanes
        lane._stream.send_now = list  # type: ignore[method-assign, assignment]
        lane._stream.send = never  # type: ignore[method-assign, assignment]
        assert await node.fetch([0]) == [0]
        await until(lambda: lane._send_queue.is_stopped)
        with pytest.raises(TransferError, match=r"nothing was taken within 0\.2 s"):
            await node.fetch([1])
