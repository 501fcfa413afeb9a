"""What those who look after the cluster ask for, however often they ask."""

import asyncio
import itertools

import pytest

from conductor.front.routes.monitoring import _Kept


def test_what_is_asked_for_all_the_time_is_made_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[bytes]:
        loop, times_s = asyncio.get_running_loop(), iter([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
        monkeypatch.setattr(loop, "time", lambda: next(times_s))
        numbers = itertools.count()
        kept = _Kept(lambda: b"%d" % next(numbers), 1.0)
        told = [kept.latest() for _ in range(6)]
        monkeypatch.undo()
        return told

    assert asyncio.run(ask()) == [b"0", b"0", b"0", b"1", b"1", b"2"]
