"""The child's side of supervision: how a child gets its configuration, reports to the supervisor, and ends.

A child process gets its configuration as one JSON line on stdin. The pipe stays open as long as the
supervisor lives. The end of the pipe, like SIGINT, ends the child at once. So does SIGTERM, unless the child
has work to finish first (`drain_on_sigterm`). Progress and the reason of a fatal error
go back as JSON lines on the descriptor named by `MOONCAKE_STATUS_FD`; a child started by hand has no such
descriptor, and only logs.

Owns: start and end of a child process. Does not know: what the child does.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from pydantic import BaseModel

from mooncake import native
from mooncake.errors import ConfigError, MismatchError, ModelError
from mooncake.node.log_writer import LogWriter

STATUS_FD_VARIABLE = "MOONCAKE_STATUS_FD"
LOG_LEVEL_VARIABLE = "MOONCAKE_LOG_LEVEL"
FATAL_EXIT_CODE = 3
STOP_DEADLINE_S = 3.0
BEAT_S = 1.0
"""Seconds between two signs of life."""

Config = TypeVar("Config", bound=BaseModel)
log = logging.getLogger(__name__)


class Progress(msgspec.Struct, tag=True, frozen=True):
    """The status that `done` of `total` units of `phase` are complete (loading weights: bytes)."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The status that the child serves. `detail` is shown at once, `hint` when all children serve."""

    detail: str = ""
    hint: str = ""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The status that the child's event loop runs.

    It is sent every `BEAT_S` seconds, unless the loop hangs or the process is paused.
    """


class Draining(msgspec.Struct, tag=True, frozen=True):
    """The status that the child finishes `work`, such as `3 open answers`, before it ends."""

    work: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """The status that the child's instance has been drained and leaves.

    The processes of the instance are not restarted.
    """


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The status that the child cannot serve, and that a restart would not help.

    The supervisor ends with this message.
    """

    message: str


class Measured(msgspec.Struct, tag=True, frozen=True):
    """The status of one measured duration for a profile (`mooncake.config.profile`).

    `first` and `second` are new and cached tokens of a prefill, or requests and KV tokens of an iteration.
    """

    what: Literal["prefill", "decode"]
    first: int
    second: int
    seconds: float
    engine: str
    device: str


Status = Progress | Ready | Alive | Draining | Left | Fatal | Measured


def report(status: Status) -> None:
    """Report a status to the supervisor. Without a supervisor the status is only logged."""
    fd = os.environ.get(STATUS_FD_VARIABLE)
    if fd is None:
        log.info("%s", status)
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(int(fd), msgspec.json.encode(status) + b"\n")


def child_main(
    config_type: type[Config],
    serve: Callable[[Config], Awaitable[None]],
    loop_factory: Callable[[Config], asyncio.AbstractEventLoop] = lambda _: asyncio.new_event_loop(),
) -> None:
    """Run `serve(config)` until it returns, SIGTERM or SIGINT arrives, or the supervisor is gone.

    `serve` is cancelled to stop it and cleans up in `finally`. An error that a restart would only repeat
    (configuration, model, mismatch) ends the process with code 3 and one line. Any other exception ends the
    process with a traceback, and the supervisor restarts it.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE, "warning").upper()
    log_writer = LogWriter(sys.stderr)
    logging.root.addHandler(log_writer)
    logging.root.setLevel(level)
    _report_compiling()
    _raise_descriptor_limit()
    config = config_type.model_validate_json(sys.stdin.readline())
    gc.freeze()  # collections that visit the modules' objects would stop a worker for 100 ms
    try:
        with asyncio.Runner(loop_factory=functools.partial(loop_factory, config)) as runner:
            runner.run(_run(serve(config)))
    except* (ConfigError, ModelError, MismatchError) as errors:
        message = first_message(errors)
        report(Fatal(message))
        log_writer.finish()
        if STATUS_FD_VARIABLE not in os.environ:  # else the supervisor shows it, once
            print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(FATAL_EXIT_CODE)
    finally:
        log_writer.finish()


class _Reporting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        report(Progress(record.getMessage(), 0, 0))


def _report_compiling() -> None:
    """Report compilations as progress, as people wait for them."""
    native.compile_log.addHandler(_Reporting())
    native.compile_log.setLevel(logging.INFO)
    native.compile_log.propagate = False


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, as every client takes one, and 1,024 are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def first_message(errors: BaseExceptionGroup[BaseException]) -> str:
    """Return the message of the first error in nested task groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def drain_on_sigterm(begin: Callable[[], None], timeout_s: float) -> None:
    """Call `begin` at the first SIGTERM, instead of ending this process.

    The child then calls `stop` when its work is done. `timeout_s` seconds after the signal, the process ends
    in any case. SIGINT still ends it at once. Needs a running event loop.
    """
    loop = asyncio.get_running_loop()

    def on_first_sigterm() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        loop.call_later(timeout_s, stop)
        begin()

    loop.add_signal_handler(signal.SIGTERM, on_first_sigterm)


def stop() -> None:
    """Stop this process as SIGINT does."""
    signal.raise_signal(signal.SIGINT)


async def _run(serve: Awaitable[None]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(serve)
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            task.cancel()
            # Device work cannot be cancelled; the end must not wait for it.
            loop.call_later(STOP_DEADLINE_S, os._exit, 0)

    def on_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):  # the supervisor is gone
            loop.remove_reader(sys.stdin.fileno())
            stop()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    loop.add_reader(sys.stdin.fileno(), on_stdin)
    beating = asyncio.create_task(_beat())
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        beating.cancel()


async def _beat() -> None:
    status_fd = os.environ.get(STATUS_FD_VARIABLE)
    while status_fd is not None:
        _, writable, _ = select.select([], [int(status_fd)], [], 0)
        if writable:  # a paused supervisor reads nothing, and must not block its children
            report(Alive())
        await asyncio.sleep(BEAT_S)
