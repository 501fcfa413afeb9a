"""The recording of a front's requests: a trace in Mooncake's format, without any text of prompts or answers.

A line has the arrival time of a request and the lengths of its prompt and output. For each block of 512
prompt tokens, it also has a hash of the prompt up to the block's end:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

Hashes are keyed with random bytes, which differ for each file and are stored nowhere. So equal beginnings of
prompts can be seen within one file, and no prompt can be found by hashing guesses. A thread hashes and
writes, and the event loop only queues. Lines are in order of arrival: a running request holds back the lines
behind it.

Owns: the file, the thread, the order of lines. Does not know: the contents of requests.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
from array import array
from collections import OrderedDict
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

import msgspec

from mooncake.errors import ConfigError
from mooncake.messages.requests import Request

log = logging.getLogger(__name__)

TRACE_BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
MOST_QUEUED = 10_000
"""The number of entries waiting for the thread above which further requests are not recorded."""
_ID_BITS = 53
"""The bits of a hash id: as many as JSON readers represent exactly."""


class TraceLine(msgspec.Struct):
    """The line of one request in a trace; lengths are in tokens."""

    timestamp: int
    """Milliseconds since the recording began."""
    input_length: int
    output_length: int
    hash_ids: list[int]


class _Began(NamedTuple):
    request: Request
    at_s: float


class _Ended(NamedTuple):
    request_id: str
    num_output_tokens: int


class Recorder:
    """The trace of one front. `began` and `ended` return at once. `close` waits until all lines are written.

    Args:
        path: The file to create. If the name is taken, a number is added to the new file's name.
        max_bytes: The size at which recording ends.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, file = _new_file(path)
        self._trace = _Trace(file, max_bytes)
        self._queue = SimpleQueue[_Began | _Ended | None]()
        self._num_left_out = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="recording", daemon=True)
        self._thread.start()
        log.info("requests are recorded in %s", self.path)

    def began(self, request: Request) -> None:
        """Record that a request was submitted. Returns at once.

        The request is left out if more than `MOST_QUEUED` entries wait for the thread.
        """
        if self._is_over.is_set():
            return
        if self._queue.qsize() > MOST_QUEUED:
            self._num_left_out += 1
            return
        self._queue.put(_Began(request, time.monotonic()))

    def ended(self, request_id: str, num_output_tokens: int) -> None:
        """Record that a request is over, with `num_output_tokens`. Returns at once."""
        if not self._is_over.is_set():
            self._queue.put(_Ended(request_id, num_output_tokens))

    def close(self) -> None:
        """Write the remaining lines and close the file. Running requests get an `output_length` of 0."""
        self._queue.put(None)
        self._thread.join()
        if self._num_left_out:
            log.warning("%d requests are not in %s: they came too fast", self._num_left_out, self.path)

    def _write(self) -> None:
        """Write lines until the recorder is closed, or the file is full or cannot be written."""
        try:
            with contextlib.closing(self._trace):
                while (item := self._queue.get()) is not None:
                    if isinstance(item, _Began):
                        self._trace.begin(item.request, item.at_s)
                    elif not self._trace.end(item.request_id, item.num_output_tokens):
                        log.warning("%s is full (conductor.record_bytes): recording has ended", self.path)
                        break
                    if self._queue.empty():
                        self._trace.flush()
        except OSError as error:
            log.warning("%s cannot be written, recording has ended: %s", self.path, error.strerror)
        self._is_over.set()


class _Trace:
    """The file of a trace, and the lines that wait for earlier lines to be written."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._bytes_left = file, max_bytes
        self._salt = os.urandom(16)
        self._began_s = time.monotonic()
        self._waiting: OrderedDict[str, TraceLine] = OrderedDict()
        """Lines in order of arrival. The first line is of a running request."""
        self._ended: set[str] = set()

    def begin(self, request: Request, at_s: float) -> None:
        """Add the line of a request. The line is written when the request has ended."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        ids = hash_ids(prompt, self._salt, request.root_key)
        timestamp = round(1000 * (at_s - self._began_s))
        self._waiting[request.request_id] = TraceLine(timestamp, len(prompt), 0, ids)

    def end(self, request_id: str, num_output_tokens: int) -> bool:
        """Set a line's output length, and write the lines before the first line of a running request.

        Returns False if the file had no room for these lines.
        """
        line = self._waiting.get(request_id)
        if line is None:
            return True  # the request was left out
        line.output_length = num_output_tokens
        self._ended.add(request_id)
        while self._waiting and (first := next(iter(self._waiting))) in self._ended:
            self._ended.remove(first)
            if not self._write(self._waiting.pop(first)):
                return False
        return True

    def _write(self, line: TraceLine) -> bool:
        encoded = msgspec.json.encode(line) + b"\n"
        if len(encoded) > self._bytes_left:
            self._waiting.clear()
            return False
        self._bytes_left -= len(encoded)
        self._file.write(encoded)
        return True

    def flush(self) -> None:
        """Flush the file's buffer, so that readers see all lines written."""
        self._file.flush()

    def close(self) -> None:
        """Write all waiting lines that fit within the limit, and close the file."""
        with self._file:
            while self._waiting and self._write(self._waiting.popitem(last=False)[1]):
                pass


def hash_ids(token_ids: list[int], salt: bytes, root_key: bytes) -> list[int]:
    """Return an id for each block of `TRACE_BLOCK_TOKENS` tokens of a prompt; the last block may be shorter.

    An id stands for its block, all tokens before the block, and `root_key`, which separates tenants.
    """
    ids, parent = [], root_key
    for begin in range(0, len(token_ids), TRACE_BLOCK_TOKENS):
        block = array("I", token_ids[begin : begin + TRACE_BLOCK_TOKENS])
        parent = hashlib.blake2b(parent + block.tobytes(), key=salt, digest_size=16).digest()
        ids.append(int.from_bytes(parent[:8]) >> 64 - _ID_BITS)
    return ids


def _new_file(path: Path) -> tuple[Path, BinaryIO]:
    """Create the file, readable only by its owner, and return its path.

    If the name is taken, the first free number is added to the name. Raises ConfigError.
    """
    numbered = (path.with_stem(f"{path.stem}.{number}") for number in itertools.count(1))
    for candidate in itertools.chain([path], numbered):
        try:
            fd = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"conductor.record: cannot write {candidate}: {error.strerror}") from None
        return candidate, os.fdopen(fd, "wb")
    raise AssertionError("numbers do not end")
