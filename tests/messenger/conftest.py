"""Settings for all tests of messengers."""

import asyncio
import functools
from collections.abc import Callable

from messenger.transport import busy_poll
from tests.leaks import pytest_pyfunc_call as pytest_pyfunc_call
from tests.leaks import unseen_exceptions as unseen_exceptions
from tests.native import compiled as compiled

POLL_S = 100e-6


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loop that messengers use, for all async tests."""
    return {"busy-poll": functools.partial(busy_poll.event_loop, POLL_S)}
