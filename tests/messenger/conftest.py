"""What is compiled when first needed is compiled before the tests: some of their deadlines are short."""

import pytest

from messenger import checksums, direct


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    checksums.prepare()
    direct.prepare()
