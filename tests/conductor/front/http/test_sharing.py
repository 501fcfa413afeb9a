"""Connections make room for others: the oldest first, and each kind for its own."""

import asyncio
from unittest.mock import Mock

import pytest

from conductor.front.http import sharing
from conductor.front.http.sharing import (
    CROWD_LEN,
    MAX_READ_AT_ONCE,
    ConnectionTable,
    ReadingTurns,
    UploadBudget,
)

MAX_WAITING = 2


def connections(num: int) -> list[Mock]:
    return [Mock() for _ in range(num)]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ConnectionTable:
    monkeypatch.setattr(sharing, "MAX_WAITING", MAX_WAITING)
    return ConnectionTable(is_tls=False)


async def test_one_that_is_served_does_not_make_room(table: ConnectionTable) -> None:
    served, old, *others = connections(2 + MAX_WAITING)
    table.accepted(served)
    table.is_served(served)
    for connection in (old, *others):
        table.accepted(connection)
    assert not served.make_room.called
    assert old.make_room.called
    assert not any(connection.make_room.called for connection in others)


async def test_one_that_closes_counts_until_it_is_lost(table: ConnectionTable) -> None:
    """A client may take nothing of its response after `Connection: close`."""
    old, *others = connections(1 + MAX_WAITING)
    for connection in (old, *others):
        table.accepted(connection)
        table.is_served(connection)
        table.closes(connection)
    assert old.abort.called
    assert not any(connection.abort.called for connection in others)
    for connection in (old, *others):
        table.lost(connection)
    assert table.has_emptied.is_set()
    new = Mock()
    table.accepted(new)
    assert not table.has_emptied.is_set()
    table.closes(new)
    assert not any(connection.abort.called for connection in (new, *others)), "the others have ended"


async def test_of_those_whose_clients_read_nothing_the_one_that_has_not_for_longest_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "MAX_STALLED", 2)
    table = ConnectionTable(is_tls=False)
    slow, stalled, *others = connections(4)
    for connection in (slow, stalled, *others):
        table.accepted(connection)
        table.is_served(connection)
    table.stalls(slow)
    table.stalls(stalled)
    table.reads_on(slow)
    table.stalls(slow)
    table.stalls(others[0])
    assert stalled.abort.called
    assert not any(connection.abort.called for connection in (slow, *others))
    table.lost(slow)
    table.stalls(others[1])
    assert not any(connection.abort.called for connection in others)
    assert table.make_room()
    assert others[0].abort.called


@pytest.mark.parametrize("are_served", [False, True])
async def test_a_crowd_has_gone_once(are_served: bool) -> None:
    table, crowd = ConnectionTable(is_tls=False), connections(CROWD_LEN)
    for connection in crowd:
        table.accepted(connection)
        if are_served:
            table.is_served(connection)
    assert not table.crowd_has_gone()
    for connection in crowd:
        table.lost(connection)
    assert table.crowd_has_gone()
    assert not table.crowd_has_gone()


def test_whoever_has_been_sending_for_longest_makes_room() -> None:
    evicted: list[str] = []
    uploads = UploadBudget[str](100, evicted.append)
    uploads.add("slow", 60)
    uploads.add("quick", 40)
    assert evicted == []
    uploads.add("quick", 1)
    assert evicted == ["slow"]
    uploads.add("another", 59)
    assert evicted == ["slow"]
    uploads.release("quick")
    uploads.add("another", 41)
    assert evicted == ["slow"]
    uploads.add("another", 1)
    assert evicted == ["slow", "another"]


async def test_a_few_connections_go_on_in_each_turn_of_the_loop_and_in_order() -> None:
    turns, done = ReadingTurns(), list[int]()
    for number in range(2 * MAX_READ_AT_ONCE + 1):
        turns.add(lambda number=number: done.append(number))  # type: ignore[misc]
    nums_done = []
    while len(done) < 2 * MAX_READ_AT_ONCE + 1:
        await asyncio.sleep(0)
        nums_done.append(len(done))
    assert done == list(range(2 * MAX_READ_AT_ONCE + 1))
    assert nums_done == [MAX_READ_AT_ONCE, 2 * MAX_READ_AT_ONCE, 2 * MAX_READ_AT_ONCE + 1]
