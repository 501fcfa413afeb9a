"""Whose pass a process computed when it ended, as its next life finds it."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from mooncake.messages.requests import Ref
from mooncake.node.process_config import PASS_RECORD_BYTES
from workers.execution.pass_record import PassRecord

A, B, C = (Ref(1, name, 1) for name in "abc")


class ExpectedError(Exception):
    """One behind which the process goes on."""


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("record")
    os.ftruncate(descriptor, PASS_RECORD_BYTES)
    yield descriptor
    os.close(descriptor)


def left_by(fd: int, life: Callable[[PassRecord], None]) -> list[Ref] | None:
    """What stands there when a process that does this has ended."""
    pid = os.fork()
    if not pid:
        try:
            life(PassRecord(fd))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return PassRecord(fd).take()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_whose_pass_it_was_outlives_the_process(fd: int) -> None:
    def life(record: PassRecord) -> None:
        with record.computing([A]):
            pass
        with record.computing([A, B]):
            die()

    assert left_by(fd, life) == [A, B]
    assert PassRecord(fd).take() == [], "it is forgotten when it has been read"


def test_between_passes_nobody_is_computed(fd: int) -> None:
    def life(record: PassRecord) -> None:
        with record.computing([A, B]):
            pass
        with pytest.raises(ExpectedError), record.computing([A], expected=ExpectedError):
            raise ExpectedError
        die()

    assert left_by(fd, life) == []


def test_an_unchanged_pass_is_found_again(fd: int) -> None:
    def life(record: PassRecord) -> None:
        refs = [A, B]
        for _ in range(2):
            with record.computing(refs):
                pass
        with record.computing(list(refs)):
            die()

    assert left_by(fd, life) == [A, B]


def test_what_has_failed_counts_whatever_is_computed_before_the_end(fd: int) -> None:
    def fail(record: PassRecord, refs: list[Ref]) -> None:
        with record.computing(refs):
            raise ZeroDivisionError

    def life(record: PassRecord) -> None:
        with pytest.raises(ZeroDivisionError):
            fail(record, [A])
        record.blame([C])
        with record.computing([B]):
            die()

    assert left_by(fd, life) == [A]

    def next_session(record: PassRecord) -> None:
        record.blame([C])
        record.clear()

    assert left_by(fd, next_session) == []


def test_a_pass_of_which_nobody_knows_whose_it_is_or_of_too_many(fd: int) -> None:
    def unknown(record: PassRecord) -> None:
        with record.computing(None):
            die()

    def crowd(record: PassRecord) -> None:
        with record.computing([Ref(1, str(number) * 20, 1) for number in range(10_000)]):
            die()

    assert left_by(fd, unknown) is None
    assert left_by(fd, crowd) is None


def test_a_pass_that_cuts_in_stands_there_as_long_as_it_takes(fd: int) -> None:
    def within(record: PassRecord) -> None:
        with record.computing([A]), record.computing([B]):
            die()

    def behind(record: PassRecord) -> None:
        with record.computing([A]):
            with record.computing([B]):
                pass
            die()

    assert left_by(fd, within) == [B]
    assert left_by(fd, behind) == [A]
