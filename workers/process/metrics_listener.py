"""An instance's own `/metrics` and `/ready`, for scrapers that read instances and not the Conductor.

Owns: the HTTP listener, in a thread of its own. Does not know: the metrics.
"""

import errno
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from mooncake.config.settings import host_and_port
from mooncake.errors import ConfigError
from mooncake.messages.instance_metrics import InstanceReport, instance_text
from mooncake.messages.workers import Role
from mooncake.security.waiting_peers import WaitingPeers

MOST_CONNECTIONS = 8
_CLIENT_TIMEOUT_S = 5.0
_KEPT_S = 0.1
"""Seconds for which the text is cached. Scrapes need no key, so even constant scraping must cost little."""


@dataclass(slots=True)
class ListenerState:
    """The state that the listener reports. The session writes it, the listener's threads read it."""

    role: Role
    """The instance's role: the configured one, or the one to which the Conductor has switched it."""
    report: InstanceReport | None = None
    """The report of the latest heartbeat; None before the first heartbeat."""
    is_registered: bool = False


@contextmanager
def listening(address: str, model_name: str, status: ListenerState) -> Iterator[int]:
    """Make a context in which HTTP requests at `address` (host:port) are answered. Yields the port.

    Raises ConfigError if the address cannot be used.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    try:
        host, port = host_and_port(address)
        handler = partial(_Handler, _Metrics(registry, model_name, status), status)
        server = (_IPv6Server if ":" in host else _Server)((host, port), handler, bind_and_activate=True)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(f"worker.metrics_listen: {address} {reason}; choose another") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Metrics:
    """The text of `/metrics`, for several threads."""

    def __init__(self, registry: CollectorRegistry, model_name: str, status: ListenerState) -> None:
        self._registry, self._model_name, self._status = registry, model_name, status
        self._lock = threading.Lock()
        self._report: InstanceReport | None = None
        self._text, self._made_s = b"", -math.inf

    def text(self) -> bytes:
        """Return the text of the latest report, at most `_KEPT_S` seconds old."""
        with self._lock:
            now_s, report = time.monotonic(), self._status.report
            if now_s > self._made_s + _KEPT_S or report is not self._report:
                reports = [] if report is None else [report]
                self._text = (
                    generate_latest(self._registry) + instance_text(reports, self._model_name).encode()
                )
                self._report, self._made_s = report, now_s
            return self._text


class _Server(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection.

    A connection above `MOST_CONNECTIONS` ends the oldest one.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        self._crowd = WaitingPeers[socket.socket](MOST_CONNECTIONS, _end)
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._crowd.enter(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._crowd.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log unexpected errors only, not clients that hang up or are disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def __init__(
        self,
        metrics: _Metrics,
        status: ListenerState,
        *connection: object,
    ) -> None:
        self._metrics, self._status = metrics, status
        super().__init__(*connection)  # type: ignore[arg-type]  # it serves the connection

    def do_GET(self) -> None:
        status = self._status
        if self.path == "/metrics":
            self._answer(200, self._metrics.text(), CONTENT_TYPE_LATEST)
        elif self.path == "/ready":
            if status.is_registered:
                self._answer(200, b"ready\n")
            else:
                self._answer(503, b"the conductor has not registered this instance\n")
        else:
            self._answer(404, b"there are /metrics and /ready\n")

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, as the only requests are scrapes."""
