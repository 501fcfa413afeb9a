"""The errors of a worker's sessions, and the report of a failed attempt.

Owns: the meaning of these errors. Does not know: where they are raised, other errors (`mooncake.errors`).
"""

from mooncake.errors import GrammarError, MooncakeError
from mooncake.messages.requests import Ref
from mooncake.messages.workers import WorkFailed


class SessionLostError(MooncakeError):
    """A peer of the session is lost, or no longer knows this worker."""


class NoRoomError(MooncakeError):
    """An instance has no room for a request now, or cannot compute the request's prompt."""


class EngineLostError(MooncakeError):
    """The engine of an instance, which is a separate process, has ended, hangs or gives invalid answers."""


class AnswerLostError(MooncakeError):
    """The engine has not completed an answer, but still runs: another attempt may succeed."""


class ModulesStayError(MooncakeError):
    """Modules cannot move to a helper, or back from it; the message says why."""


def report_of(ref: Ref, error: Exception) -> WorkFailed:
    """Return the report that the attempt `ref` has failed with `error`.

    Another attempt may succeed, except after a GrammarError: the report then refuses the request, and names
    the request's field that is at fault.
    """
    if isinstance(error, GrammarError):
        return WorkFailed(ref, str(error), retryable=False, is_refused=True, param="grammar")
    return WorkFailed(ref, str(error), retryable=True)
