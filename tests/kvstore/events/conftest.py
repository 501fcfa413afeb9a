"""A fixture that makes the queues of publishers small, so that an unread queue is soon full."""

import pytest

from kvstore.events import internal as internal_events
from kvstore.events import publisher as event_publisher


@pytest.fixture
def small_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_events, "SNAPSHOT_PART_KEYS", 10_000)
    monkeypatch.setattr(event_publisher, "ANSWER_QUEUE_LEN", 1)
    monkeypatch.setattr(event_publisher, "ANSWER_TIMEOUT_S", 0.2)
