"""Readers of trace files: Mooncake's format, and CSV; plain or `.gz`.

A file is read line by line, so it may be long. A line that is no request ends the reading with an error that
names the line. Two faults of real traces are repaired, counted and reported instead. A request without an
input or an output (it failed where the trace was recorded) is left out. A request that is earlier than the
previous one gets the time of the previous one.

Owns: formats. Does not know: what a trace is used for.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path

import msgspec

from benchmarks.tools.traces.request import TraceError, TraceRequest, num_blocks_of

_ARRIVALS = ("arrival_s", "arrival", "timestamp")
_INPUTS = ("num_input_tokens", "input_length", "input", "contexttokens", "request tokens")
_OUTPUTS = ("num_output_tokens", "output_length", "output", "generatedtokens", "response tokens")


class TraceFile:
    """An iterable of the requests of one file, in order of arrival. The first one arrives at second 0.

    `num_dropped` and `num_out_of_order` count the repairs of the latest iteration.
    """

    def __init__(self, path: Path) -> None:
        """Prepare to read `path`. Raises TraceError if its suffix is unknown."""
        self.path = path
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        parsers: dict[str, Callable[[Iterator[str], str], Iterator[tuple[int, TraceRequest]]]] = {
            ".jsonl": _mooncake,
            ".csv": _csv,
        }
        if suffix not in parsers:
            raise TraceError(
                f"{path}: expected a trace in a .jsonl (Mooncake's format) or .csv file, or either with .gz"
            )
        self._parse = parsers[suffix]
        self.num_dropped = self.num_out_of_order = 0

    @property
    def repairs(self) -> str:
        """The repairs as text for people; empty if there were none."""
        said = []
        if self.num_dropped:
            said.append(f"{self.num_dropped} requests without input or output left out")
        if self.num_out_of_order:
            said.append(f"{self.num_out_of_order} requests out of order arrive with the one before")
        return "; ".join(said)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests. Raises TraceError."""
        self.num_dropped = self.num_out_of_order = 0
        first_s = latest_s = None
        try:
            with self._open() as lines:
                for line, request in self._parse(lines, str(self.path)):
                    if not (request.num_input_tokens and request.num_output_tokens):
                        self.num_dropped += 1
                        continue
                    _check_blocks(request, f"{self.path}:{line}")
                    if first_s is None or latest_s is None:
                        first_s = latest_s = request.arrival_s
                    self.num_out_of_order += request.arrival_s < latest_s
                    latest_s = max(latest_s, request.arrival_s)
                    yield request._replace(arrival_s=latest_s - first_s)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise TraceError(
                f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        if first_s is None:
            raise TraceError(f"{self.path} has no request with an input and an output")

    def _open(self) -> TextIOWrapper:
        if self.path.suffix == ".gz":
            return TextIOWrapper(gzip.open(self.path), encoding="utf-8", newline="")
        return self.path.open(encoding="utf-8", newline="")


def _check_blocks(request: TraceRequest, where: str) -> None:
    expected = num_blocks_of(request.num_input_tokens)
    if request.hash_ids and len(request.hash_ids) != expected:
        raise TraceError(
            f"{where}: {request.num_input_tokens} input tokens are {expected} blocks of 512, "
            f"but there are {len(request.hash_ids)} hash_ids"
        )
    if len(set(request.hash_ids)) < len(request.hash_ids):
        raise TraceError(
            f"{where}: one of the hash_ids occurs twice, but each stands for its block and all before it"
        )


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    """Milliseconds since the trace's beginning."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.timestamp < 0 or self.input_length < 0 or self.output_length < 0:
            raise ValueError("timestamp and lengths cannot be negative")


def _mooncake(lines: Iterator[str], path: str) -> Iterator[tuple[int, TraceRequest]]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        yield (
            number,
            TraceRequest(entry.timestamp / 1000, entry.input_length, entry.output_length, entry.hash_ids),
        )


def _csv(lines: Iterator[str], path: str) -> Iterator[tuple[int, TraceRequest]]:
    rows = csv.reader(lines)
    header = [name.strip().lower() for name in next(rows, [])]
    columns = [_column(header, names, path) for names in (_ARRIVALS, _INPUTS, _OUTPUTS)]
    for row in rows:
        if not row:
            continue
        try:
            arrival, num_input, num_output = (row[column].strip() for column in columns)
            request = TraceRequest(_seconds(arrival), int(num_input), int(num_output))
        except (IndexError, ValueError) as error:
            raise TraceError(f"{path}:{rows.line_num}: {error}") from None
        if request.num_input_tokens < 0 or request.num_output_tokens < 0:
            raise TraceError(f"{path}:{rows.line_num}: lengths cannot be negative")
        yield rows.line_num, request


def _column(header: list[str], names: tuple[str, ...], path: str) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise TraceError(f"{path}:1: expected a column called one of {', '.join(names)}, got {', '.join(header)}")


def _seconds(text: str) -> float:
    """Parse a number of seconds, or a date and time. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"expected a time, got {text}")
    return seconds
