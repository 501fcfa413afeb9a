"""What all tests of this folder need."""

import functools
from collections.abc import Callable

from messenger.transport.listening import ListeningLoop
from tests.leaks import pytest_pyfunc_call as pytest_pyfunc_call
from tests.leaks import unseen_exceptions as unseen_exceptions
from tests.native import compiled as compiled

LISTEN_S = 100e-6


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], ListeningLoop]]:
    """The event loop of a messenger."""
    return {"listening": functools.partial(ListeningLoop, LISTEN_S)}
