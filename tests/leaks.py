"""Checks for each async test: no task, descriptor or unseen exception may be left behind.

A module whose tests are checked imports the fixture; the `conftest.py` of a folder imports both names.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
import pytest_asyncio


@pytest.fixture(autouse=True)
def unseen_exceptions(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Yield the exceptions that the event loop reports.

    When the loop is closed, the test fails if there were any, or if a descriptor is left open.
    """
    unseen: list[str] = []
    if not pytest_asyncio.is_async_test(request.node):
        yield unseen
        return
    gc.freeze()  # older objects are not looked at again and again
    try:
        before = _descriptors()
        yield unseen
        gc.collect()  # finalizers close descriptors, and report tasks whose exception nobody has seen
    finally:
        gc.unfreeze()
    if _descriptors() - before:
        gc.collect()  # the owners of some are older than the freeze
    left = _descriptors() - before
    assert not left, left
    assert unseen == []


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Fail an async test that leaves a task in its event loop."""
    if not pytest_asyncio.is_async_test(pyfuncitem):
        return (yield)
    loop, unseen = asyncio.get_event_loop(), pyfuncitem.funcargs["unseen_exceptions"]
    loop.set_exception_handler(lambda _, context: unseen.append(f"{context['message']}: {context}"))
    result = yield
    assert asyncio.all_tasks(loop) == set()
    gc.collect()
    return result


def _descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors, each as its number and its target.

    So a number that is used again counts as a new descriptor.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
