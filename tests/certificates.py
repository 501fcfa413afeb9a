"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path

from tests.deadline import DEADLINE_S


def self_signed(folder: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Make a new certificate for `name` that signs itself, and its key.

    Returns their paths, which are `cert.pem` and `key.pem` in `folder`.
    """
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test"
    )
    options = ["-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *options], check=True, capture_output=True, timeout=DEADLINE_S)
    return cert, key
