"""What is compiled when first needed is compiled before the tests: some of their deadlines are short."""

import pytest

from messenger import board, catalogue, checksums, direct, listening


def load() -> None:
    """All that a messenger needs."""
    checksums.prepare()
    direct.prepare()
    board.native()
    catalogue.native()
    listening.prepare()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """For the folder whose conftest.py imports it."""
    load()
