"""The end of a request's work when the client disconnects before the response has started.

Owns: this end. Does not know: the work, how a disconnect is noticed (`exchange`).
"""

import asyncio
from types import TracebackType

from starlette.requests import ClientDisconnect, Request

from conductor.front.http.exchange import RESPONSE_STREAM, ResponseStream


class WhileConnected:
    """A context for the work of a request: if the client disconnects, the work is cancelled, and the context
    raises ClientDisconnect.

    Without this context, the request of a client that disconnects while its body waits or is read would be
    submitted like all others.
    """

    def __init__(self, request: Request) -> None:
        self._stream: ResponseStream = request.scope["extensions"][RESPONSE_STREAM]
        self._task: asyncio.Task[object] | None = None
        """The task to cancel; None outside the context."""
        self._has_gone = False

    def __enter__(self) -> None:
        self._stream.on_disconnect(self._on_disconnect)
        if self._has_gone:
            raise ClientDisconnect
        self._task = asyncio.current_task()

    def _on_disconnect(self) -> None:
        self._has_gone = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._has_gone and task is not None:
            is_cancelled_by_others = task.uncancel() > 0
            if kind is asyncio.CancelledError and not is_cancelled_by_others:
                raise ClientDisconnect from None
