"""The errors of a worker's sessions, and the report of an error; `mooncake.errors` has the others.

Owns: the meaning of these errors. Does not know: where they are raised.
"""

from mooncake.errors import GrammarError, MooncakeError
from mooncake.messages.requests import Ref
from mooncake.messages.workers import WorkFailed


class SessionLostError(MooncakeError):
    """A peer of the session is lost, or no longer knows this worker."""


class NoRoomError(MooncakeError):
    """An instance has no room for a request now, or cannot compute its prompt."""


class EngineLostError(MooncakeError):
    """The engine of an instance, which is a separate process, has ended, hangs or gives invalid answers."""


class AnswerLostError(MooncakeError):
    """The engine has not completed an answer, and goes on: another attempt may succeed."""


class ModulesStayError(MooncakeError):
    """Modules cannot move to a helper, or back from it; the message says why."""


def report_of(ref: Ref, error: Exception, *, retryable: bool = True) -> WorkFailed:
    """Return the report that an attempt has failed by `error`.

    A request whose grammar cannot be followed is refused, as no attempt would succeed. Its client is told
    which field is at fault.
    """
    if isinstance(error, GrammarError):
        return WorkFailed(ref, str(error), retryable=False, is_refused=True, param="grammar")
    return WorkFailed(ref, str(error), retryable)
