"""What is logged of requests: one line when each has ended, and nothing that anybody wrote."""

import logging
import queue
from collections.abc import Iterator

import httpx
import pytest

from conductor.front.generation import request_log
from conductor.front.generation.request_log import RequestLog
from mooncake.messages.requests import Request
from tests.conductor.front.fakes import MODEL_NAME, FakeCluster, Running
from tests.deadline import DEADLINE_S

LOGGER = request_log.__name__
SECRET = "what nobody else may read"


def ended(log: RequestLog, *, ttft_s: float | None, num_tokens: int, gaps_s: list[float], how: str) -> None:
    log.ended(
        "chatcmpl-a-0",
        how,
        num_prompt_tokens=132,
        num_cached_tokens=96,
        num_tokens=num_tokens,
        ttft_s=ttft_s,
        gaps_s=gaps_s,
    )


def test_a_line_has_tokens_times_and_instances(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    log = RequestLog(lambda request_id: ("prefill-0", "decode-1"))
    ended(log, ttft_s=0.12345, num_tokens=3, gaps_s=[0.01, 0.03], how="stop")
    assert caplog.messages == [
        "request chatcmpl-a-0: 132 tokens in, 96 cached, 3 out, TTFT 0.123 s, TBT 30.0 ms,"
        " prefill-0 -> decode-1, stop"
    ]


def test_what_is_not_known_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    ended(RequestLog(None), ttft_s=None, num_tokens=0, gaps_s=[], how="aborted")
    ended(RequestLog(lambda _: (None, "decode-0")), ttft_s=1.0, num_tokens=1, gaps_s=[], how="length")
    assert caplog.messages == [
        "request chatcmpl-a-0: 132 tokens in, 0 out, aborted",
        "request chatcmpl-a-0: 132 tokens in, 96 cached, 1 out, TTFT 1.000 s, decode-0, length",
    ]


def test_nothing_is_looked_up_for_a_line_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)

    def pair_of(request_id: str) -> tuple[str | None, str | None]:
        raise AssertionError("nobody reads it")

    ended(RequestLog(pair_of), ttft_s=1.0, num_tokens=1, gaps_s=[], how="stop")
    assert caplog.messages == []


class Lines(logging.Handler):
    """What the front logs, in its thread: a line may come after the answer."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def next(self) -> str:
        return self._lines.get(timeout=DEADLINE_S)


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger(LOGGER)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)


def ask(front: Running, **more: object) -> httpx.Response:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": SECRET}], **more}
    return httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


def test_each_choice_is_told_once_and_without_its_text(front: Running, lines: Lines) -> None:
    answer = ask(front, n=2).json()
    told = [lines.next(), lines.next()]
    assert {line.partition(":")[0] for line in told} == {f"request {answer['id']}-{i}" for i in (0, 1)}
    for line in told:
        assert ", 16 cached, 7 out, TTFT " in line
        assert line.endswith(", stop")
        assert SECRET not in line
        assert "Hello" not in line
    assert ask(front, n=1).status_code == 200
    assert lines.next().split(":")[0] not in told, "no choice is told twice"


def test_a_request_that_was_refused_is_told_with_the_reason(front: Running, lines: Lines) -> None:
    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "all instances are busy", 1.0)

    front.cluster.behaviour = reject
    assert ask(front).status_code == 429
    assert lines.next().endswith(" tokens in, 0 out, all instances are busy")


def test_a_request_whose_client_hangs_up_is_told(front: Running, lines: Lines) -> None:
    async def begin(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, list(b"Hel"))

    front.cluster.behaviour = begin
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": SECRET}], "stream": True}
    url = f"{front.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
        assert next(response.iter_lines())
    line = lines.next()
    assert ", 3 out, " in line
    assert line.endswith(", aborted")
