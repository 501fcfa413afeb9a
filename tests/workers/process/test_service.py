"""A worker's sessions, one after the other."""

import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from workers.errors import SessionLostError
from workers.execution.pass_record import PassRecord
from workers.process import service


class Ended(Exception):
    """The end of the test."""


class LostSession:
    """A session that is lost at once, and whose parts refer to each other."""

    all: ClassVar[list["weakref.ref[LostSession]"]] = []
    is_registered = True

    def __init__(self, *_: object) -> None:
        self.itself = self

    async def run(self) -> None:
        self.all.append(weakref.ref(self))
        if len(self.all) > 2:
            raise Ended
        raise SessionLostError("a peer is lost")


async def test_nothing_is_left_of_a_session_when_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(service, "LeaderSession", LostSession)
    monkeypatch.setattr(service.log, "disabled", True)  # pytest keeps what is logged, and with it the session
    first = SimpleNamespace(number=0)
    process: Any = SimpleNamespace(incarnation=1, rank=first, stage=first)
    executor: Any = SimpleNamespace(record=PassRecord(None))
    wanted: Any = SimpleNamespace(wanted=SimpleNamespace(is_set=lambda: False))
    nothing: Any = None
    with pytest.raises(Ended):
        await service._serve_sessions(process, executor, nothing, "", nothing, wanted, nothing, nothing)
    assert [session() for session in LostSession.all[:2]] == [None, None]
