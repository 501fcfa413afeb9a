"""The errors of a worker's sessions; `mooncake.errors` has the others.

Owns: their meaning. Does not know: where they are raised.
"""

from mooncake.errors import MooncakeError


class SessionLostError(MooncakeError):
    """A peer of the session is lost, or no longer knows this worker."""


class NoRoomError(MooncakeError):
    """An instance has no room for a request now, or cannot compute its prompt."""


class EngineLostError(MooncakeError):
    """The engine of an instance, which is a separate process, has ended, hangs or gives invalid answers."""


class AnswerLostError(MooncakeError):
    """The engine has not completed an answer, and goes on: another attempt may succeed."""


class ModulesStayError(MooncakeError):
    """Modules cannot move, to a helper or back; the message says why."""
