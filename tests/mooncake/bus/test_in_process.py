"""Messages within one process come in order, and none is lost with a reader that gives up."""

import asyncio

import pytest

from mooncake.bus.in_process import Inbox, InProcessLink


async def test_each_end_gets_what_the_other_sends_as_it_is() -> None:
    to_left, to_right = Inbox[list[int]](), Inbox[str]()
    left, right = InProcessLink(to_right, to_left), InProcessLink(to_left, to_right)
    message = [1]
    await left.send("a")
    await left.send("b")
    await right.send(message)
    assert (left.num_queued, right.num_unread) == (2, 2)
    assert [await right.recv(), await right.recv()] == ["a", "b"]
    assert (left.num_queued, right.num_unread) == (0, 0)
    assert await left.recv() is message


async def test_a_reader_that_gives_up_takes_no_message_with_it() -> None:
    inbox = Inbox[str]()
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put_nowait("came as it gave up")
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    inbox.put_nowait("came later")
    assert len(inbox) == 2
    assert [await inbox.get(), await inbox.get()] == ["came as it gave up", "came later"]


async def test_a_reader_that_waits_is_woken_once_for_all_there_is() -> None:
    inbox = Inbox[int]()
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    for message in range(3):
        inbox.put_nowait(message)
    assert [await reader, await inbox.get(), await inbox.get()] == [0, 1, 2]
