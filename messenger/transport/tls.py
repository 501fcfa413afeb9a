"""Optional TLS between messengers, with certificates on both sides.

The cluster's own authority has signed the certificates. The cluster key says who may take part; TLS also
keeps messages and the KVCache from eavesdroppers.

Owns: the certificate files and TLS settings, wrapped sockets. Does not know: the data.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake.config.sections import SecurityConfig
from mooncake.errors import ConfigError
from mooncake.security.certificates import node_context


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS contexts for either end of a connection."""

    connecting: ssl.SSLContext
    accepting: ssl.SSLContext

    @classmethod
    def of(cls, security: SecurityConfig) -> "Tls | None":
        """Return the contexts with the configured certificates; None if no certificate is configured.

        Raises ConfigError for unusable files.
        """
        if security.tls_cert is None:
            return None
        files = security.tls_cert, security.tls_key, security.tls_ca
        return cls(
            node_context(ssl.PROTOCOL_TLS_CLIENT, *files), node_context(ssl.PROTOCOL_TLS_SERVER, *files)
        )

    def good_until_s(self) -> float:
        """Return the end of this node's certificate, in seconds of `time.time`.

        The method makes a TLS handshake between two ends in this process. Raises ConfigError if the handshake
        fails, as it would fail with other nodes.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.connecting.wrap_bio(to_client, to_server)
        server = self.accepting.wrap_bio(to_server, to_client, server_side=True)
        try:
            for end in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            raise ConfigError(
                f"security.tls_cert is not signed by security.tls_ca, or not good today: {error}"
            ) from None
        return ssl.cert_time_to_seconds(str((client.getpeercert() or {})["notAfter"]))

    def connect(self, sock: socket.socket) -> "TlsSocket":
        """Return the connecting TLS end of the connected socket `sock`."""
        return TlsSocket(self.connecting, sock, server_side=False)

    def accept(self, sock: socket.socket) -> "TlsSocket":
        """Return the accepting TLS end of `sock`."""
        return TlsSocket(self.accepting, sock, server_side=True)


class TlsSocket:
    """A non-blocking socket with TLS, and with those methods of a plain socket that `Stream` uses.

    Like a plain socket it raises BlockingIOError instead of waiting, in place of ssl's own errors. So the
    error does not say whether the wait would be to read or to write; during a handshake it may be either. The
    TLS socket owns the plain one.
    """

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> None:
        self._ssl = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        self.family = self._ssl.family
        self.fileno, self.close = self._ssl.fileno, self._ssl.close
        self.getpeername, self.getsockname = self._ssl.getpeername, self._ssl.getsockname
        self.getsockopt, self.setsockopt = self._ssl.getsockopt, self._ssl.setsockopt
        self.setblocking = self._ssl.setblocking

    def shutdown(self, how: int) -> None:
        """Shut down the plain socket.

        ssl's own shutdown would end the decryption too, and later reads would return ciphertext.
        """
        socket.socket.shutdown(self._ssl, how)

    def do_handshake(self) -> None:
        with _blocking():
            self._ssl.do_handshake()

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancillary_bytes: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """Receive into the first buffer only, and return what `socket.recvmsg_into` returns.

        There is no ancillary data.
        """
        with _blocking():
            return self._ssl.recv_into(buffers[0]), [], 0, None

    def sendmsg(self, buffers: Sequence[memoryview], ancillary: Sequence[object] = ()) -> int:
        """Send bytes of the first buffer only, and return their number.

        After a BlockingIOError the next call must have the same buffer.
        """
        assert not ancillary
        with _blocking():
            return self._ssl.send(buffers[0])


@contextlib.contextmanager
def _blocking() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
