"""The certificate of HTTPS: checked at the start, and loaded again when its files change.

Owns: the TLS context of the listeners. Does not know: who listens.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from conductor.front.http.watching import WatchedFiles
from mooncake.errors import ConfigError
from mooncake.security.certificates import load_certificate

_LOOK_S = 1.0

log = logging.getLogger(__name__)


class Certificate:
    """A TLS certificate and its key, from their files. Every handshake uses the TLS context `context`."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Read both files. Raises ConfigError for a certificate or key that cannot be used."""
        self._cert, self._key = cert, key
        self._files = WatchedFiles([cert, key])
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_into(self.context)

    async def follow(self) -> None:
        """Watch the files until cancelled.

        Open connections go on; new connections get the new certificate.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Read certificate and key again if their files have changed.

        If the new pair cannot be used, an error is logged and the old pair stays in use.
        """
        if not self._files.have_changed():
            return
        try:
            # On trial: half of a new pair must not get into the context that is used.
            self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_into(self.context)
        except ConfigError as error:  # one file may have been written, and not the other yet
            log.error("the certificate stays as it was: %s", error)
        else:
            log.warning("the certificate has been read again")

    def _load_into(self, context: ssl.SSLContext) -> None:
        load_certificate(context, self._cert, self._key)
