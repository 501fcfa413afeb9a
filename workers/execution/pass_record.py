"""A record of the requests whose pass is being computed, in memory that outlives the process.

The next process reads which requests were being computed when the previous process ended. The memory has two
areas, each with a length and a list of `Ref`s, the names of attempts. One area is for the running pass, the
other for the pass or request that has failed. (A failed process may still compute for other requests until it
ends.)

Owns: this memory. Does not know: how a process ended, what becomes of the requests.
"""

import contextlib
import mmap
import struct
from collections.abc import Iterator, Sequence

import msgspec

from mooncake.messages.requests import Ref
from mooncake.node.process_config import PASS_RECORD_BYTES

_LENGTH = struct.Struct("I")
_AREA_BYTES = PASS_RECORD_BYTES // 2
_MOST_BYTES = _AREA_BYTES - _LENGTH.size
_NOBODY = 0
_UNKNOWN = 0xFFFFFFFF
_RUNNING, _FAILED = 0, _AREA_BYTES
_decoder = msgspec.msgpack.Decoder(list[Ref])


class PassRecord:
    """The record in the memory of the descriptor `fd`, which the supervisor keeps.

    Without `fd` the record is lost when the process ends.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, PASS_RECORD_BYTES)
        self._running: list[Ref] | None = []
        self._written: list[Ref] | None = []
        self._length = _NOBODY
        """The length field of the latest entry for the running pass.

        It is the entry's number of bytes, `_UNKNOWN` if the requests are unknown or do not fit into the area,
        or `_NOBODY` before the first entry.
        """

    def take(self) -> list[Ref] | None:
        """Return the requests that the previous process was computing when it ended; None if unknown.

        If `blame` has recorded failed requests, only these are returned. The record is cleared. To be called
        before the first pass.
        """
        left = self._read(_FAILED)
        if left == []:
            left = self._read(_RUNNING)
        self.clear()
        return left

    def clear(self) -> None:
        """Record that no pass is running and none has failed."""
        for area in (_RUNNING, _FAILED):
            self._set_length(area, _NOBODY)

    @contextlib.contextmanager
    def computing(
        self, refs: list[Ref] | None, expected: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Make a context in which a pass of these requests is recorded as running.

        If the requests are unknown, `refs` is None. To be used on the device thread. An error that is not
        `expected` will end this process, so the requests are recorded as failed. While a second pass cuts
        into this one, only the second pass is recorded.
        """
        outer, self._running = self._running, refs
        self._note_running()
        try:
            yield
        except expected:
            raise
        except Exception:
            self.blame(refs)
            raise
        finally:
            self._running = outer
            self._note_running()

    def blame(self, refs: list[Ref] | None) -> None:
        """Record that the work of these requests has failed, and will end this process.

        Only the first call has an effect.
        """
        if self._read(_FAILED) == []:
            self._set_length(_FAILED, self._write(_FAILED, refs))

    def _note_running(self) -> None:
        if self._running == []:
            self._set_length(_RUNNING, _NOBODY)
            return
        if self._running != self._written:
            self._set_length(_RUNNING, _NOBODY)
            self._written, self._length = self._running, self._write(_RUNNING, self._running)
        self._set_length(_RUNNING, self._length)

    def _write(self, area: int, refs: Sequence[Ref] | None) -> int:
        """Write an entry, and return the value of its length field."""
        if refs is None:
            return _UNKNOWN
        data = msgspec.msgpack.encode(refs)
        if len(data) > _MOST_BYTES:
            return _UNKNOWN
        start = area + _LENGTH.size
        self._memory[start : start + len(data)] = data
        return len(data)

    def _set_length(self, area: int, length: int) -> None:
        _LENGTH.pack_into(self._memory, area, length)

    def _read(self, area: int) -> list[Ref] | None:
        [length] = _LENGTH.unpack_from(self._memory, area)
        if length == _NOBODY:
            return []
        start = area + _LENGTH.size
        return None if length == _UNKNOWN else _decoder.decode(self._memory[start : start + length])
