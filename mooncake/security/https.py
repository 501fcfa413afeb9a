"""The API's HTTPS certificate.

Owns: how its files are read, and what is said of files that cannot be used. Does not know: who listens
(`conductor.front.http.certificate`).
"""

import ssl
from pathlib import Path

from mooncake.errors import ConfigError


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load certificate and key into `context`. Raises ConfigError if they cannot be used."""
    try:
        # A password would be asked for on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise ConfigError(
            f"http.tls_cert {cert} and http.tls_key {key} cannot be used ({reason});"
            " expected a PEM certificate chain and its private key without password"
        ) from None
