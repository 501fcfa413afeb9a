"""A TCP relay between a client and a server. Tests use it to break their connections."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """A relay. Clients connect to its `port`. While `swallows` is set, the server's data are dropped."""

    def __init__(self, server_port: int) -> None:
        self.swallows = False
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def break_connections(self) -> None:
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which would go on for ever
        self._listener.close()
        self.break_connections()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target, server), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not (self.swallows and source is server):
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """Make a context with a running relay to the server at `port`."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
