"""Work of a request whose client disconnects before the response has started."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from conductor.front.http.disconnects import while_connected
from conductor.front.http.exchange import RESPONSE_STREAM


class Client:
    """A request's stream, whose client disconnects when a test says so."""

    def __init__(self) -> None:
        self._callback: Callable[[], object] = lambda: None
        self._has_gone = False
        scope: dict[str, Any] = {"type": "http", "extensions": {RESPONSE_STREAM: self}}
        self.request = Request(scope)

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        if self._has_gone:
            callback()

    def disconnect(self) -> None:
        self._has_gone = True
        self._callback()


async def work_for(client: Client, has_begun: asyncio.Event, may_end: asyncio.Event) -> str:
    with while_connected(client.request):
        has_begun.set()
        await may_end.wait()
    await asyncio.sleep(0)
    return "done"


async def begun(client: Client) -> tuple[asyncio.Task[str], asyncio.Event]:
    """Begin work for a client. Returns its task, and the event for which it waits."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(work_for(client, has_begun, may_end))
    await has_begun.wait()
    return task, may_end


async def test_a_disconnect_ends_the_work() -> None:
    client = Client()
    task, _ = await begun(client)
    client.disconnect()
    with pytest.raises(ClientDisconnect):
        await task
    assert not task.cancelled()


async def test_a_disconnect_after_the_work_cancels_nothing() -> None:
    client = Client()
    task, may_end = await begun(client)
    may_end.set()
    await asyncio.sleep(0)
    client.disconnect()
    assert await task == "done"


async def test_no_work_begins_for_a_client_that_has_gone() -> None:
    client = Client()
    client.disconnect()
    with pytest.raises(ClientDisconnect):
        await work_for(client, asyncio.Event(), asyncio.Event())
    await asyncio.sleep(0)  # not cancelled


async def test_a_cancellation_by_the_server_stays_one() -> None:
    client = Client()
    task, _ = await begun(client)
    task.cancel()
    client.disconnect()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ValueError, match="wrong"), while_connected(Client().request):
        raise ValueError("wrong")
