"""Errors of a worker's own life, beside those of `mooncake.errors`.

Owns: their meaning. Does not know: who raises them.
"""

from mooncake.errors import MooncakeError


class SessionLostError(MooncakeError):
    """Somebody without whom a session cannot go on is gone, or no longer knows this worker."""
