"""Errors of the pool as they travel: what a call raises in a messenger, its user raises.

Owns: which error is which `CallFailed`. Does not know: what was called.
"""

from kvstore.protocol.answers import CallFailed, ErrorKind
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError, PoolFullError, TransferError


def failed_call(call_id: int, error: MooncakeError, space_epoch: int = 0) -> CallFailed:
    """The answer that makes the other side raise `error`."""
    match error:
        case PoolFullError():
            return CallFailed(call_id, ErrorKind.POOL_FULL, str(error), space_epoch=space_epoch)
        case MismatchError():
            mismatch = (error.what, str(error.ours), str(error.theirs))
            return CallFailed(call_id, ErrorKind.MISMATCH, str(error), mismatch=mismatch)
        case TransferError():
            return CallFailed(call_id, ErrorKind.TRANSFER, str(error))
        case ConfigError():
            return CallFailed(call_id, ErrorKind.CONFIG, str(error))
        case _:
            return CallFailed(call_id, ErrorKind.POOL, str(error))


def error_of(failed: CallFailed, advice: str) -> MooncakeError:
    """What the caller raises. `advice`: what to do where both sides do not fit."""
    match failed.kind:
        case ErrorKind.POOL_FULL:
            return PoolFullError(failed.message)
        case ErrorKind.TRANSFER:
            return TransferError(failed.message)
        case ErrorKind.CONFIG:
            return ConfigError(failed.message)
        case ErrorKind.MISMATCH if failed.mismatch is not None:
            what, theirs, ours = failed.mismatch
            return MismatchError(what, ours, theirs, advice)
        case _:
            return PoolError(failed.message)
