"""The end of a request's work when the client disconnects before the response has started.

Owns: this end. Does not know: the work, how a disconnect is noticed (`exchange`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from conductor.front.http.exchange import RESPONSE_STREAM, ResponseStream


@contextmanager
def while_connected(request: Request) -> Iterator[None]:
    """Make a context whose work is cancelled if the client of `request` disconnects.

    The context then raises ClientDisconnect. It raises ClientDisconnect at once if the client disconnected
    before. Other errors of the work are raised as they are. Without this context, a request would be
    submitted even if its client had disconnected while the request's body waited or was read.
    """
    stream: ResponseStream = request.scope["extensions"][RESPONSE_STREAM]
    task: asyncio.Task[object] | None = None
    has_gone = False

    def on_disconnect() -> None:
        nonlocal has_gone
        has_gone = True
        if task is not None:
            task.cancel()

    stream.on_disconnect(on_disconnect)
    if has_gone:
        raise ClientDisconnect
    this_task = task = asyncio.current_task()
    assert this_task is not None, "requests are tasks"
    try:
        yield
    except asyncio.CancelledError:
        if has_gone and this_task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        task = None
