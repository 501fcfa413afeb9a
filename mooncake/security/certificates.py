"""Certificates: for HTTPS of the API, and for TLS between messengers.

Owns: how their files are read, and the errors about files that cannot be used. Does not know: the sockets
(`conductor.front.http.certificate`, `messenger.transport.tls`).
"""

import ssl
from pathlib import Path

from mooncake.errors import ConfigError


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load certificate and key of HTTPS into `context`. Raises ConfigError if they cannot be used."""
    try:
        # Without this function OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise ConfigError(
            f"http.tls_cert {cert} and http.tls_key {key} cannot be used ({reason});"
            " expected a PEM certificate chain and its private key without password"
        ) from None


def node_context(protocol: "ssl._SSLMethod", cert: Path, key: Path | None, ca: Path | None) -> ssl.SSLContext:
    """Return a context for either end of TLS between messengers.

    Raises ConfigError for unusable files.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes are known by address; the authority signs only nodes of the cluster.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(cert, key, _no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.tls_cert {cert} with tls_key {key} cannot be used: {error}") from None
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.tls_ca {ca} cannot be used: {error}") from None
    return context


def _no_passphrase() -> str:
    """Refuse to ask for a passphrase, as OpenSSL would wait for it at the terminal."""
    raise ConfigError("security.tls_key has a passphrase, and nobody is there to type it: name a key without")
