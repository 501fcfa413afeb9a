"""Lines of the log about spans that are lost on their way to the collector.

The SDK complains of each failed try to send a batch, though the next try may succeed. Here the log says once
that spans are lost, and once that spans reach the collector again.

Owns: which complaints of the SDK are losses, when losses have ended. Does not know: spans, how they are sent.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

QUIET_S = 30.0
"""Seconds without a loss after which losses count as over.

The SDK reports a full queue at most once in 20 s.
"""
_OF_EXPORTER, _OF_QUEUE = "opentelemetry.exporter", "opentelemetry.sdk._shared_internal"
"""Two loggers of the SDK: one for complaints about exports, which may still succeed, one for lost spans."""
log = logging.getLogger(__name__)


class Losses(logging.Handler):
    """A log handler that separates losses from other complaints of the SDK.

    It logs when losses begin and end.
    """

    def __init__(self, endpoint: str) -> None:
        """Begin without losses. `endpoint`: the collector's URL, for the log."""
        super().__init__(logging.WARNING)
        self._endpoint, self._changing = endpoint, threading.Lock()
        self._lost_s: float | None = None
        """Time of the newest loss; None before the first loss, and after losses have ended."""
        self._complaint = ""
        """The first complaint about an export since the last success; empty without one."""

    @property
    def is_refused(self) -> bool:
        """Whether the collector has not taken the latest spans, as far as is known."""
        return self._complaint != ""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Make a context in which the SDK's complaints come to this handler and not into the log."""
        loggers = [logging.getLogger(name) for name in (_OF_EXPORTER, _OF_QUEUE)]
        for each in loggers:
            each.handlers, each.propagate = [self], False
        try:
            yield
        finally:
            for each in loggers:  # a thread that has not ended may still complain
                each.handlers = [logging.NullHandler()]

    def emit(self, record: logging.LogRecord) -> None:
        """Process a complaint of the SDK."""
        if record.name == _OF_QUEUE:
            self._lost(record.getMessage())
        elif not self._complaint:
            self._complaint = record.getMessage()

    def failed(self) -> None:
        """Record that the collector has not taken a batch, which is lost."""
        self._lost(self._complaint)

    def taken(self) -> None:
        """Record that the collector has taken a batch."""
        self._complaint = ""
        with self._changing:
            if self._lost_s is not None and time.monotonic() - self._lost_s >= QUIET_S:
                self._lost_s = None
                log.warning("spans reach %s again", self._endpoint)

    def _lost(self, reason: str) -> None:
        with self._changing:
            if self._lost_s is None:
                log.warning("spans do not reach %s, and are lost meanwhile: %s", self._endpoint, reason)
            self._lost_s = time.monotonic()
