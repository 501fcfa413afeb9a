"""What is compiled when first needed is compiled before the tests: some of their deadlines are short."""

import pytest

from messenger.shm import catalogue, copy_table
from messenger.wire import checksums


def load() -> None:
    """All that a messenger needs."""
    checksums.prepare()
    copy_table.native()
    catalogue.native()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """For the folder whose conftest.py imports it."""
    load()
