"""Compilation of C++ before the tests, as some tests have deadlines that are shorter than a compilation."""

import pytest

from messenger.shm import catalogue, copy_table
from messenger.wire import checksums


def load() -> None:
    """Compile and load the C++ that a messenger needs."""
    checksums.prepare()
    copy_table.native()
    catalogue.native()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the C++ of messengers. The fixture acts on the folder whose conftest.py imports it."""
    load()
