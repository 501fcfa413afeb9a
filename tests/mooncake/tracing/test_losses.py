"""Which complaints of OpenTelemetry's SDK are told, and how often."""

import logging
from collections.abc import Iterator

import pytest

from mooncake.tracing import losses
from mooncake.tracing.losses import Losses

URL = "http://collector:4318"
EXPORTER = logging.getLogger("opentelemetry.exporter.otlp.json.http.trace_exporter")
QUEUE = logging.getLogger("opentelemetry.sdk._shared_internal")
LOST, OVER = f"spans do not reach {URL}, and are lost meanwhile: ", f"spans reach {URL} again"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the product has logged."""
    return [record.getMessage() for record in caplog.records if record.name == losses.__name__]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    monkeypatch.setattr(QUEUE, "filters", [])  # equal complaints come once in 20 s
    heard = Losses(URL)
    with heard.heard():
        yield heard


def test_a_try_that_succeeds_later_is_no_loss(heard: Losses, caplog: pytest.LogCaptureFixture) -> None:
    EXPORTER.warning("Transient error")
    assert heard.is_refused
    heard.taken()
    assert not heard.is_refused
    assert said(caplog) == []


def test_a_batch_that_fails_is_told_with_its_first_complaint(
    heard: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        EXPORTER.warning("Transient error: refused")
        EXPORTER.error("Failed to export")
        heard.failed()
    assert said(caplog) == [f"{LOST}Transient error: refused"]
    assert heard.is_refused


def test_a_queue_that_is_full_again_is_the_same_trouble(
    heard: Losses, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        QUEUE.warning("Queue full")
        heard.taken()
    assert said(caplog) == [f"{LOST}Queue full"]
    monkeypatch.setattr(losses, "QUIET_S", 0.0)
    heard.taken()
    heard.taken()
    assert said(caplog)[1:] == [OVER]
    QUEUE.warning("Queue full")
    assert said(caplog)[2:] == [f"{LOST}Queue full"]


def test_other_complaints_of_the_sdk_go_into_the_log(heard: Losses, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("opentelemetry.attributes").warning("Invalid type")
    heard.taken()
    assert (caplog.messages, said(caplog)) == (["Invalid type"], [])
    assert not heard.is_refused
