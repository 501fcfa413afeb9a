import contextlib
import io
import logging
import os
from collections.abc import Iterator

import pytest

from mooncake.node import log_writer
from mooncake.node.log_writer import LogWriter

log = logging.Logger("part")


@pytest.fixture(autouse=True)
def no_handlers() -> Iterator[None]:
    yield
    log.handlers.clear()


def test_lines_are_written_in_their_order_with_the_values_of_then() -> None:
    seen, values = io.StringIO(), ["before"]
    writer = LogWriter(seen)
    log.addHandler(writer)
    log.info("values are %s", values)
    values[0] = "after"
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("failed")
    writer.finish()
    first, second, *rest = seen.getvalue().splitlines()
    assert first.endswith(" I part: values are ['before']")
    assert second.endswith(" E part: failed")
    assert rest[-1] == "ValueError: wrong"


def test_a_pipe_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "LAST_LINES_S", 0.01)
    unread, pipe = os.pipe()
    file = os.fdopen(pipe, "w")
    writer = LogWriter(file)
    log.addHandler(writer)
    for number in range(2 * log_writer.QUEUE_LEN):
        log.info("%d %s", number, "x" * 100)
    writer.finish()
    os.close(unread)  # the writer's thread gets an error, and goes on
    with contextlib.suppress(BrokenPipeError):
        file.close()
