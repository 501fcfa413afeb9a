"""Compilation of C++ before the tests rather than at its first use, as some tests have short deadlines."""

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
    """A fixture for the folder whose conftest.py imports it: the C++ of messengers is compiled."""
    load()
