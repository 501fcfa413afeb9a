"""Commands that install a peer.

Owns: their error. Does not know: what is installed.
"""

import subprocess
from collections.abc import Mapping

from benchmarks.kvstore.mooncake_store import PeerError


def run(package: str, command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command, and return its output. Raises PeerError with the last line of its error output."""
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PeerError(f"{package} cannot be installed: {reason}")
    return done.stdout
