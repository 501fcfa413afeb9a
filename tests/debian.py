"""Programs of Debian (`benchmarks.debian`) for tests, and the end of a test whose program cannot be had."""

import os
from pathlib import Path

import pytest

from benchmarks.debian import CannotFetchError, fetch


def fetched(package: str, program: str) -> Path:
    """Return the path of `program` (its path inside the package, from / on). Skips the test if the program
    cannot be had; in CI the test fails, so that it does not quietly stop running there."""
    try:
        return fetch(package) / program
    except CannotFetchError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs {package}: {error}")
        pytest.skip(f"no {package}: {error}")
