"""The end of a front without loss of answers: new requests are refused, open ones are answered.

Owns: the number of open requests, and whether new ones are taken. Does not know: signals, how long the end
may take.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.front.errors import UnavailableError


class FrontDrain:
    """The drain of a front: whether it has begun, and how many requests are open.

    A POST request is open from the time when the application gets it to the time when the application has
    sent the end of its response. Requests with other methods do not count, and the drain does not wait for
    them.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Prepare the drain. `on_end` is called as soon as the drain has begun and no request is open.

        `on_end` is called again whenever a later request, which was refused, has ended.
        """
        self._on_end = on_end
        self._has_begun = False
        self.on_begin: Callable[[], None] = lambda: None
        """The function that is called when the drain begins."""
        self.num_open = 0
        """The number of open requests."""

    def begin(self) -> None:
        """Begin to drain: from now on, `check` raises UnavailableError."""
        self._has_begun = True
        self.on_begin()
        self._end_if_empty()

    def check(self) -> None:
        """Raise UnavailableError if the drain has begun."""
        if self._has_begun:
            raise UnavailableError("the server is shutting down and takes no new requests")

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers as `app` does, and whose open requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            self.num_open += 1
            try:
                await app(scope, receive, send)
            finally:
                self.num_open -= 1
                self._end_if_empty()

        return counted

    def _end_if_empty(self) -> None:
        if self._has_begun and not self.num_open:
            self._on_end()
