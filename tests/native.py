"""What is compiled when first needed is compiled before the tests: some of their deadlines are short."""

import pytest

from messenger import board, catalogue, checksums, direct
from messenger.listening import Patience


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """For the folder whose conftest.py imports it."""
    checksums.prepare()
    direct.prepare()
    board.native()
    catalogue.native()
    Patience()
