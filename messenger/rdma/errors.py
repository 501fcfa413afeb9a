"""Errors of RDMA, each with its remedy.

Owns: the meaning of completion statuses. Does not know: queue pairs, retries.
"""

from typing import Final

from messenger.transport.transports import Remedy
from mooncake.errors import TransferError


class RdmaError(TransferError):
    """An operation over RDMA has failed, here or at the peer. `remedy`: what may help."""

    def __init__(self, message: str, remedy: Remedy) -> None:
        super().__init__(message)
        self.remedy = remedy


class RdmaUnavailableError(RdmaError):
    """The machine, device or driver does not support the operation.

    The message has the reason and the remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, Remedy.OTHER_PATH)


SUCCESS: Final = 0
_STATUSES: Final[dict[int, tuple[str, Remedy]]] = {  # the numbers of enum ibv_wc_status
    1: ("local length error", Remedy.GIVE_UP),
    2: ("the queue pair cannot do this operation", Remedy.GIVE_UP),
    4: ("the local range is not registered", Remedy.GIVE_UP),
    5: ("flushed: the queue pair was closed or had failed before", Remedy.RETRY),
    6: ("the memory window cannot be bound", Remedy.GIVE_UP),
    7: ("the peer sent a response that does not fit", Remedy.RETRY),
    8: ("the local range does not allow this access", Remedy.GIVE_UP),
    9: ("the peer found the request invalid", Remedy.GIVE_UP),
    10: ("the peer refused access: wrong key, or a range outside what was granted", Remedy.GIVE_UP),
    11: ("the peer's device could not complete the request", Remedy.OTHER_PATH),
    12: ("no answer from the peer", Remedy.OTHER_PATH),
    13: ("the peer was not ready for too long", Remedy.RETRY),
    16: ("the peer aborted the request", Remedy.RETRY),
    19: ("the device is in a fatal state", Remedy.OTHER_PATH),
    20: ("no response from the peer", Remedy.OTHER_PATH),
}


def completion_error(status: int, peer: str) -> RdmaError:
    """Return the error for a work completion that is not SUCCESS.

    An unknown status counts as a failure of the path.
    """
    assert status != SUCCESS
    what, remedy = _STATUSES.get(status, ("transport error", Remedy.OTHER_PATH))
    return RdmaError(f"RDMA with {peer}: {what} (completion status {status})", remedy)
